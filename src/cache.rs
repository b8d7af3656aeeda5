//! The cache: what a token is, in bytes ([`layout`]), the pool of pages ([`spec`]), and where a layer's pages are ([`view`]). Pure; no
//! other file knows how a token lies in memory.

pub(crate) mod decode_spec;
mod layout;
mod shape;
mod spec;
mod view;

pub(crate) use layout::{INDEX_DIM, INDEX_SHAPE};
pub use layout::{KvLayout, Scales, Section, TokenLayout};
pub use shape::{MlaShape, SUPPORTED_DIMS};
pub use spec::KvSpec;
pub(crate) use view::name_slabs;
pub use view::{KvView, Slabs};
