//! The device that egui and wgpu-mla share.

use std::sync::Arc;

use eframe::egui_wgpu::{RenderState, WgpuSetup, WgpuSetupCreateNew};
use wgpu_mla::wgpu;

use crate::shared::Shared;

/// egui's own descriptor, and on top of it what wgpu-mla's better kernel variants need.
pub fn setup() -> WgpuSetup {
    let mut setup = WgpuSetupCreateNew::without_display_handle();
    let egui_needs = setup.device_descriptor.clone();
    setup.device_descriptor = Arc::new(move |adapter| {
        // SAFETY: nothing else in this program uses experimental features.
        let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
        let (egui, mla) = (egui_needs(adapter), wgpu_mla::gpu::wanted(adapter, experimental));
        wgpu::DeviceDescriptor {
            required_features: egui.required_features | mla.features,
            required_limits: egui.required_limits.or_better_values_from(&mla.limits),
            experimental_features: mla.experimental,
            ..egui
        }
    });
    setup.into()
}

/// A device that goes away, or that has something against a call, is told to the window: wgpu would panic.
pub fn watch(state: &RenderState, shared: &Arc<Shared>) {
    let told = shared.clone();
    state.device.set_device_lost_callback(move |reason, message| {
        let message = if message.is_empty() { format!("{reason:?}") } else { message };
        // A device that is dropped as the window closes tells so too.
        if !told.is_closing() {
            told.lose(message);
        }
    });
    let told = shared.clone();
    state.device.on_uncaptured_error(Arc::new(move |error: wgpu::Error| {
        told.show(|shown| shown.notice = Some(format!("The device refused a call: {error}")));
    }));
}
