//! Offsets and strides at the end of u64, on every op: an error or, where one is unread, nothing. Never an overflow.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use wgpu_mla::{Backend, Error, Kernel, Op, for_each_op};

use super::Session;

/// Numbers whose sums and products with counts and sizes leave u64, multiples of every unit among them.
const NUMBERS: [u64; 7] =
    [u64::MAX, u64::MAX - 7, 1 << 63, (1 << 63) - 8, u64::MAX / 2 + 9, u64::MAX / 4 * 2, (1 << 61) + 8];

/// A number of arguments, by name.
type Place<A> = (&'static str, fn(&mut A) -> &mut u64);

macro_rules! places {
    ($($($part:ident).+),* $(,)?) => {
        &[$((stringify!($($part).+), |args| &mut args.$($part).+)),*]
    };
}

mod caches;
mod heads;

thread_local! {
    /// The ops that were bound.
    static BOUND: RefCell<BTreeSet<&'static str>> = const { RefCell::new(BTreeSet::new()) };
}

/// Binds with each number at each place, for each room.
fn bind_all<'a, O, B>(
    session: &Session<'_, B>,
    op: O,
    good: O::Args<&'a B::Buffer>,
    rooms: &[O::Extent],
    places: &[Place<O::Args<&'a B::Buffer>>],
) -> Result<(), Error>
where
    O: Op,
    B: Backend + Kernel<O>,
    O::Args<&'a B::Buffer>: Clone,
{
    BOUND.with_borrow_mut(|bound| bound.insert(O::NAME));
    let compiled = session.backend.compile(op)?;
    for &room in rooms {
        let what = format!("{} for {room:?}", O::NAME);
        session.note(&what, compiled.bind(&good, room).map(drop).map_err(|error| error.to_string()));
        for &(place, at) in places {
            for number in NUMBERS {
                let mut args = good.clone();
                *at(&mut args) = number;
                let bound = catch_unwind(AssertUnwindSafe(|| compiled.bind(&args, room).map(drop)));
                let result = match bound {
                    Ok(Ok(()) | Err(_)) => Ok(()),
                    Err(panic) => {
                        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
                        Err(text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default())
                    }
                };
                session.note(&format!("{what}, {place} {number}"), result);
            }
        }
    }
    Ok(())
}

/// Every number of every op's arguments.
pub fn extreme_views<B: Backend>(session: &Session<'_, B>) {
    BOUND.take();
    let result = all(session);
    session.note("extreme views", result.map_err(|error| error.to_string()));
    macro_rules! names {
        ($($op:ty),*) => { [$(<$op>::NAME),*] };
    }
    let bound = BOUND.take();
    for name in for_each_op!(names) {
        let result = if bound.contains(name) { Ok(()) } else { Err("no arguments here".to_owned()) };
        session.note(&format!("{name} is bound"), result);
    }
    session.finish("extreme views");
}

fn all<B: Backend>(session: &Session<'_, B>) -> Result<(), Error> {
    let backend = session.backend;
    let buffer = || backend.buffer(1 << 16);
    let buffers = [buffer()?, buffer()?, buffer()?, buffer()?, buffer()?, buffer()?, buffer()?, buffer()?];
    caches::bind(session, &buffers)?;
    heads::bind(session, &buffers)
}
