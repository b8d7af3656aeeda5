//! The pages of the cache as a grid: coloured by sequence, striped where several share one.

use eframe::egui::{self, Align2, Color32, FontId, Mesh, Painter, Pos2, Rect, Sense, Stroke, pos2, vec2};

use super::{palette, select};
use crate::shown::{PagesShown, Shown};
use crate::writer::Ask;

const CELL: egui::Vec2 = vec2(32.0, 18.0);
const GAP: f32 = 2.0;
/// Height of a free page's line.
const FREE: f32 = 2.0;

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
        ui.spacing_mut().item_spacing.x = 5.0;
        ui.weak(format!(
            "{used} of {} pages of {} tokens in use, {shared} shared; by sequence:",
            pages.len(),
            shown.pages.page_size
        ));
        for &(number, ..) in &shown.pages.tables {
            swatch(ui, &[number], &number.to_string());
        }
        free_swatch(ui);
        let first: Vec<usize> = shown.pages.tables.iter().map(|&(number, ..)| number).take(2).collect();
        if first.len() > 1 {
            swatch(ui, &first, "shared");
        }
    });
    let columns = ((ui.available_width() + GAP) / (CELL.x + GAP)).floor().max(1.0) as usize;
    let rows = pages.len().div_ceil(columns);
    let size = vec2(ui.available_width(), rows as f32 * (CELL.y + GAP));
    let (rect, response) = ui.allocate_exact_size(size, Sense::click());
    let corner = pos2(rect.left().round(), rect.top().round());
    let place = |at: usize| {
        let (column, row) = ((at % columns) as f32, (at / columns) as f32);
        Rect::from_min_size(corner + vec2(column * (CELL.x + GAP), row * (CELL.y + GAP)), CELL)
    };
    grounds(ui, pages.iter().enumerate().map(|(at, page)| (place(at), page)), shown.pages.page_size);
    for (at, page) in pages.iter().enumerate().filter(|(_, page)| !page.owners.is_empty()) {
        used_page(ui, place(at), at, page, shown.pages.page_size);
    }
    let pointed = response.hover_pos().and_then(|at| (0..pages.len()).find(|&page| place(page).contains(at)));
    if let Some(at) = pointed {
        if response.clicked()
            && let Some(&owner) = pages[at].owners.first()
        {
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
            page.filled =
                page.filled.max(tokens.saturating_sub(place * shown.page_size).min(shown.page_size));
        }
    }
    pages
}

/// All pages as one mesh, a line where one is free, and as much colour from the left as one is filled. A shape a page, or more area, costs
/// a software device milliseconds.
fn grounds<'a>(ui: &egui::Ui, pages: impl Iterator<Item = (Rect, &'a Page)>, page_size: usize) {
    let (free, empty) = (ui.visuals().widgets.inactive.bg_fill, ui.visuals().extreme_bg_color);
    let mut mesh = Mesh::default();
    for (rect, page) in pages {
        match page.owners.first() {
            None => mesh.add_colored_rect(rect.with_min_y(rect.bottom() - FREE), free),
            Some(&owner) => {
                mesh.add_colored_rect(rect, empty);
                mesh.add_colored_rect(filled(rect, page, page_size), palette::of_sequence(owner));
            }
        }
    }
    ui.painter().add(mesh);
}

/// The part of a page's cell that its tokens fill.
fn filled(rect: Rect, page: &Page, page_size: usize) -> Rect {
    let part = page.filled as f32 / page_size.max(1) as f32;
    Rect::from_min_size(rect.min, vec2((rect.width() * part).round(), rect.height()))
}

/// A page's number, and stripes where several sequences have it.
fn used_page(ui: &egui::Ui, rect: Rect, id: usize, page: &Page, page_size: usize) {
    let painter = ui.painter();
    let is_plain = page.owners.len() == 1 && page.filled == page_size;
    let mut ink = palette::ink_on(palette::of_sequence(page.owners[0]));
    if !is_plain {
        stripes(painter, filled(rect, page, page_size), &page.owners);
        // On stripes and beside the colour's end a number needs a ground of its own.
        let ground = Rect::from_center_size(rect.center(), vec2(22.0, 12.0));
        painter.rect_filled(ground, 0.0, ui.visuals().extreme_bg_color);
        ink = ui.visuals().strong_text_color();
    }
    painter.text(rect.center(), Align2::CENTER_CENTER, id, FontId::proportional(10.5), ink);
}

/// Stripes of the owners' colours, over that of the first; none where there is but one.
fn stripes(painter: &Painter, rect: Rect, owners: &[usize]) {
    const STRIPE: f32 = 6.0;
    let colour = |at: usize| palette::of_sequence(owners[at % owners.len()]);
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
    painter.line_segment(
        [from - beyond, from + vec2(height, -height) + beyond],
        Stroke::new(width * 0.72, colour),
    );
}

/// Not in a group of their own, as those do not wrap.
fn swatch(ui: &mut egui::Ui, owners: &[usize], words: &str) {
    let (rect, _) = ui.allocate_exact_size(vec2(18.0, 12.0), Sense::hover());
    ui.painter().rect_filled(rect, 0.0, palette::of_sequence(owners[0]));
    stripes(ui.painter(), rect, owners);
    ui.weak(words);
}

fn free_swatch(ui: &mut egui::Ui) {
    let (rect, _) = ui.allocate_exact_size(vec2(18.0, 12.0), Sense::hover());
    let line = rect.with_min_y(rect.bottom() - FREE);
    ui.painter().rect_filled(line, 0.0, ui.visuals().widgets.inactive.bg_fill);
    ui.weak("free");
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
    let tokens = owner
        .map_or(&[][..], |owner| owner.tokens.get(first..last.min(owner.tokens.len())).unwrap_or_default());
    let text: String =
        tokens.iter().filter_map(|&id| shown.vocabulary.get(id as usize)).map(String::as_str).collect();
    format!("Page {id} holds tokens {} to {last} of {who}: {text:?}", first + 1)
}
