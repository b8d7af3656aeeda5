//! The line at the bottom: who attends, how fast, and why this kernel variant.

use eframe::egui::{self, RichText};

use crate::shown::{Check, Phase, Shown};
use crate::times::{Times, quantile};

pub fn show(ui: &mut egui::Ui, shown: &Shown, times: &Times, shows_why: &mut bool) {
    ui.add_space(2.0);
    ui.horizontal_wrapped(|ui| {
        ui.label(RichText::new(doing(&shown.phase)).strong());
        let Some(about) = &shown.about else { return };
        ui.separator();
        ui.label(format!("{:.1} tokens/s", shown.speed.tokens_per_second))
            .on_hover_text("New tokens of all sequences, of the last 1.5 s.");
        ui.separator();
        let layer = format!(
            "Bytes of the cache that attention read, by the device's clock; a layer takes {:.2} ms.",
            shown.speed.layer_ms
        );
        ui.label(format!("{:.3} GB/s", shown.speed.gigabytes_per_second)).on_hover_text(layer);
        ui.separator();
        let p95 = quantile(times.recent.iter().copied(), 0.95);
        ui.label(format!("p95 of frames {p95:.0} ms")).on_hover_text(&about.slice);
        ui.separator();
        ui.label(format!("variant {}, {} cache", about.variant, about.kv));
        if let Some(scales) = about.scales {
            ui.label(RichText::new("k_scale 1").color(ui.visuals().warn_fg_color)).on_hover_text(scales);
        }
        ui.toggle_value(shows_why, "why").on_hover_text("Why this variant was selected.");
        ui.separator();
        check(ui, &shown.check);
        ui.label(&about.name).on_hover_text(&about.adapter);
    });
    if let Some(about) = shown.about.as_ref().filter(|_| *shows_why) {
        egui::ScrollArea::vertical().id_salt("why").max_height(96.0).show(ui, |ui| {
            ui.weak(&about.why);
            ui.weak(&about.slice);
        });
    }
    ui.add_space(2.0);
}

/// What a check found, where one was made.
fn check(ui: &mut egui::Ui, check: &Check) {
    match check {
        Check::NotYet => return,
        Check::Running => _ = ui.label("checking"),
        Check::Done { furthest, tokens } => {
            let words = format!(
                "A decode over {tokens} tokens against an f64 oracle: the largest error of {} elements, which are up to {:.1}.",
                furthest.elements, furthest.largest
            );
            ui.label(format!("checked: error {:.1e}", furthest.error)).on_hover_text(words);
        }
    }
    ui.separator();
}

fn doing(phase: &Phase) -> &'static str {
    match phase {
        Phase::Loading => "loading",
        Phase::Compiling => "compiling",
        Phase::Reading { .. } => "reading",
        Phase::Writing => "writing",
        Phase::Paused => "paused",
        Phase::Done => "done",
        Phase::Failed => "stopped",
    }
}
