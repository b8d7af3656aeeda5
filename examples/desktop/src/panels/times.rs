//! A graph of the last frames' times.

use eframe::egui;
use egui_plot::{GridMark, HLine, Line, LineStyle, PlotBounds, PlotPoints};

use super::fixed_plot;
use crate::times::{SHOWN, Times, quantile};

const HEIGHT: f32 = 104.0;

pub fn show(ui: &mut egui::Ui, times: &Times) {
    ui.horizontal_wrapped(|ui| {
        ui.heading("Frame times");
        let recent = || times.recent.iter().copied();
        let (half, most) = (quantile(recent(), 0.5), quantile(recent(), 0.95));
        ui.weak(format!(
            "of the last {} frames: p50 {half:.1} ms, p95 {most:.1} ms; dashed: 60 Hz",
            times.recent.len()
        ));
    });
    let points: PlotPoints<'_> =
        times.recent.iter().rev().enumerate().map(|(at, &ms)| [-(at as f64), f64::from(ms)]).collect();
    // A frame that stands out is cut off, so that the others can be told apart.
    let top = (f64::from(quantile(times.recent.iter().copied(), 0.98)) * 1.2).max(30.0);
    let every = [10.0, 20.0, 50.0, 100.0].into_iter().find(|every| top / every <= 4.0).unwrap_or(200.0);
    let marks = move |_| {
        let values = (0..=4).map(|at| f64::from(at) * every).filter(|&value| value <= top);
        values.map(|value| GridMark { value, step_size: every }).collect()
    };
    let weak = ui.visuals().weak_text_color();
    let colour = ui.visuals().hyperlink_color;
    fixed_plot("times", HEIGHT)
        .show_grid([false, true])
        .x_axis_label("the last frames, the newest at the right")
        .y_axis_label("ms")
        .y_axis_min_width(58.0)
        .y_grid_spacer(marks)
        .y_axis_formatter(|mark, _| format!("{:.0}", mark.value))
        .x_axis_formatter(|_, _| String::new())
        .label_formatter(|position| {
            let (egui_plot::HoverPosition::NearDataPoint { position, .. }
            | egui_plot::HoverPosition::Elsewhere { position }) = position;
            Some(format!("{:.1} ms", position.y))
        })
        .show(ui, |plot| {
            plot.set_plot_bounds(PlotBounds::from_min_max([-(SHOWN as f64), 0.0], [0.0, top]));
            plot.hline(
                HLine::new("60 Hz", 1000.0 / 60.0)
                    .color(weak)
                    .style(LineStyle::dashed_loose())
                    .allow_hover(false),
            );
            plot.line(Line::new("frame", points).color(colour).width(1.2));
        });
}
