//! The pages of the cache as a grid: coloured by sequence, striped where several share one.

use eframe::egui::{self, Align2, Color32, FontId, Painter, Pos2, Rect, Sense, Stroke, StrokeKind, pos2, vec2};

use super::{palette, select};
use crate::shown::{PagesShown, Shown};
use crate::writer::Ask;

const CELL: egui::Vec2 = vec2(32.0, 20.0);
const GAP: f32 = 3.0;

/// A page's sequences, and how much of it is used.
#[derive(Clone, Default)]
struct Page {
    /// Numbers of its sequences.
    owners: Vec<usize>,
    /// Its index in them.
    place: usize,
    /// Tokens in it.
    filled: usize,
}

pub fn show(ui: &mut egui::Ui, shown: &Shown, selected: &mut usize, asks: &mut Vec<Ask>) {
    let pages = owners(&shown.pages);
    let used = pages.iter().filter(|page| !page.owners.is_empty()).count();
    let shared = pages.iter().filter(|page| page.owners.len() > 1).count();
    ui.heading("Pages of the cache");
    ui.horizontal_wrapped(|ui| {
        ui.weak(format!("{used} of {} pages of {} tokens in use, {shared} shared", pages.len(), shown.pages.page_size));
        for &(number, ..) in &shown.pages.tables {
            swatch(ui, &[number], &format!("sequence {number}"));
        }
        let first: Vec<usize> = shown.pages.tables.iter().map(|&(number, ..)| number).take(2).collect();
        if first.len() > 1 {
            swatch(ui, &first, "shared");
        }
    });
    let columns = ((ui.available_width() + GAP) / (CELL.x + GAP)).floor().max(1.0) as usize;
    let rows = pages.len().div_ceil(columns);
    let size = vec2(ui.available_width(), rows as f32 * (CELL.y + GAP));
    let (rect, response) = ui.allocate_exact_size(size, Sense::click());
    let place = |at: usize| {
        let (column, row) = ((at % columns) as f32, (at / columns) as f32);
        Rect::from_min_size(rect.min + vec2(column * (CELL.x + GAP), row * (CELL.y + GAP)), CELL)
    };
    for (at, page) in pages.iter().enumerate() {
        cell(ui, place(at), at, page, shown.pages.page_size);
    }
    let pointed = response.hover_pos().and_then(|at| (0..pages.len()).find(|&page| place(page).contains(at)));
    if let Some(at) = pointed {
        if response.clicked() && let Some(&owner) = pages[at].owners.first() {
            select(owner, selected, asks);
        }
        response.on_hover_text_at_pointer(tell(at, &pages[at], shown));
    }
}

fn owners(shown: &PagesShown) -> Vec<Page> {
    let mut pages = vec![Page::default(); shown.num_pages];
    for (number, tokens, table) in &shown.tables {
        for (place, &id) in table.iter().enumerate() {
            let Some(page) = pages.get_mut(id as usize) else { continue };
            page.owners.push(*number);
            page.place = place;
            page.filled = page.filled.max(tokens.saturating_sub(place * shown.page_size).min(shown.page_size));
        }
    }
    pages
}

fn cell(ui: &egui::Ui, rect: Rect, id: usize, page: &Page, page_size: usize) {
    let painter = ui.painter();
    let edge = ui.visuals().widgets.noninteractive.bg_stroke;
    let mut ink = ui.visuals().weak_text_color();
    if let Some(&first) = page.owners.first() {
        // A page that is partly filled is partly coloured, from the left.
        let filled = page.filled as f32 / page_size.max(1) as f32;
        let part = Rect::from_min_size(rect.min, vec2(rect.width() * filled, rect.height()));
        painter.rect_filled(rect, 2.0, ui.visuals().extreme_bg_color);
        paint(painter, part, &page.owners);
        ink = if filled > 0.6 { palette::ink_on(palette::of_sequence(first)) } else { ui.visuals().text_color() };
        if page.owners.len() > 1 {
            // On stripes a number needs a ground of its own.
            let ground = Rect::from_center_size(rect.center(), vec2(22.0, 12.0));
            painter.rect_filled(ground, 2.0, ui.visuals().extreme_bg_color);
            ink = ui.visuals().strong_text_color();
        }
    }
    painter.rect_stroke(rect, 2.0, edge, StrokeKind::Inside);
    painter.text(rect.center(), Align2::CENTER_CENTER, id, FontId::proportional(10.5), ink);
}

/// Stripes of the owners' colours; one colour where there is one.
fn paint(painter: &Painter, rect: Rect, owners: &[usize]) {
    const STRIPE: f32 = 6.0;
    let colour = |at: usize| palette::of_sequence(owners[at % owners.len()]);
    painter.rect_filled(rect, 2.0, colour(0));
    if owners.len() < 2 {
        return;
    }
    let painter = painter.with_clip_rect(rect.intersect(painter.clip_rect()));
    let steps = ((rect.width() + rect.height()) / STRIPE) as usize + 1;
    for step in (0..=steps).filter(|step| step % owners.len() != 0) {
        let x = rect.left() - rect.height() + (step as f32 + 0.5) * STRIPE;
        slanted(&painter, pos2(x, rect.bottom()), rect.height(), STRIPE, colour(step));
    }
}

fn slanted(painter: &Painter, from: Pos2, height: f32, width: f32, colour: Color32) {
    let beyond = vec2(2.0, -2.0);
    painter.line_segment([from - beyond, from + vec2(height, -height) + beyond], Stroke::new(width * 0.72, colour));
}

fn swatch(ui: &mut egui::Ui, owners: &[usize], words: &str) {
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 4.0;
        let (rect, _) = ui.allocate_exact_size(vec2(18.0, 12.0), Sense::hover());
        paint(ui.painter(), rect, owners);
        ui.weak(words);
    });
}

fn tell(id: usize, page: &Page, shown: &Shown) -> String {
    if page.owners.is_empty() {
        return format!("Page {id} is free.");
    }
    let numbers: Vec<String> = page.owners.iter().map(usize::to_string).collect();
    let who = match numbers.len() {
        1 => format!("sequence {}", numbers[0]),
        _ => format!("sequences {}, which share it", numbers.join(", ")),
    };
    let size = shown.pages.page_size;
    let (first, last) = (page.place * size, page.place * size + page.filled);
    let owner = shown.sequences.iter().find(|sequence| sequence.number == page.owners[0]);
    let tokens = owner.map_or(&[][..], |owner| owner.tokens.get(first..last.min(owner.tokens.len())).unwrap_or_default());
    let text: String = tokens.iter().filter_map(|&id| shown.vocabulary.get(id as usize)).map(String::as_str).collect();
    format!("Page {id} holds tokens {} to {last} of {who}: {text:?}", first + 1)
}
