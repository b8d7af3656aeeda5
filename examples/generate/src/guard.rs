//! Calls of a library that panics on some input, as errors.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::sync::Once;

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// What `call` gives, or the message it panicked with.
///
/// The message becomes an error, which is printed once. So the panic hook is silent for this thread meanwhile; panics of other threads
/// go to the previous hook.
pub fn caught<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                before(panic);
            }
        }));
    });
    let was = QUIET.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    QUIET.set(was);
    result.map_err(|panic| match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
        (Some(text), _) => text.clone(),
        (None, Some(text)) => (*text).into(),
        (None, None) => "it panicked".into(),
    })
}
