//! What every other module uses: dtypes, errors, masks, strided views, hashes. Pure, and without imports from the rest of the crate.

pub mod dtype;
pub mod error;
pub(crate) mod fnv;
pub(crate) mod id;
pub(crate) mod mask;
pub(crate) mod memory;
pub(crate) mod order;
pub(crate) mod threads;
pub(crate) mod view;
