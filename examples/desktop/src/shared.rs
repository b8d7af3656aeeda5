//! What the window, its frames and the threads behind it have in common.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use eframe::egui;

use crate::shown::Shown;
use crate::slice::Slice;

/// One device's life: a window that starts again has another.
pub struct Shared {
    context: egui::Context,
    shown: Mutex<Shown>,
    /// What the next frame records.
    slice: Mutex<Option<Slice>>,
    closing: AtomicBool,
    /// See [`Shared::draw`].
    drawing: AtomicBool,
    lost: OnceLock<String>,
}

impl Shared {
    pub fn new(context: egui::Context, shown: Shown) -> Self {
        Self {
            context,
            shown: Mutex::new(shown),
            slice: Mutex::default(),
            closing: AtomicBool::new(false),
            drawing: AtomicBool::new(false),
            lost: OnceLock::new(),
        }
    }

    /// What is on the screen. Held for as long as it takes to copy or draw, never over a wait.
    pub fn shown(&self) -> MutexGuard<'_, Shown> {
        lock(&self.shown)
    }

    /// Changes what is on the screen, and asks for a frame.
    pub fn show(&self, change: impl FnOnce(&mut Shown)) {
        change(&mut self.shown());
        self.context.request_repaint();
    }

    /// Gives the next frame something to record.
    pub fn hand(&self, slice: Slice) {
        *lock(&self.slice) = Some(slice);
        self.context.request_repaint();
    }

    /// For the frame: what it has to record.
    pub fn take(&self) -> Option<Slice> {
        lock(&self.slice).take()
    }

    /// No more frames will come.
    pub fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
    }

    pub fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// While egui draws, up to the frame's commands, no other thread may ask the device anything that would tell of its loss: egui-wgpu
    /// panics where the device is lost between the look at it, in `App::ui`, and the upload of what was drawn.
    pub fn draw(&self, is_drawing: bool) {
        self.drawing.store(is_drawing, Ordering::Relaxed);
    }

    pub fn is_drawing(&self) -> bool {
        self.drawing.load(Ordering::Relaxed)
    }

    /// The device is gone. The first reason stays: what fails afterwards follows from it.
    pub fn lose(&self, why: impl Into<String>) {
        let _ = self.lost.set(why.into());
        self.context.request_repaint();
    }

    /// Why the device is gone, if it is.
    pub fn lost(&self) -> Option<&str> {
        self.lost.get().map(String::as_str)
    }
}

/// A thread that panicked leaves its data as it was: what is shown is then old, and no reason to panic too.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
