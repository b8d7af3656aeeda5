//! Arrays whose length is a caller's: what has no memory is an error, where `collect` and `with_capacity` would end the process.

use super::error::{Error, Result};

/// An empty array with room for so many elements.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn room_for<T>(len: usize, what: &'static str) -> Result<Vec<T>> {
    let mut array = Vec::new();
    array.try_reserve_exact(len).map_err(|_| Error::OutOfMemory { what })?;
    Ok(array)
}

/// Adds an element to an array that grows with a caller's.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn push<T>(array: &mut Vec<T>, element: T, what: &'static str) -> Result<()> {
    extend(array, [element], what)
}

/// Adds elements to an array that grows with a caller's.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn extend<T>(
    array: &mut Vec<T>,
    elements: impl IntoIterator<Item = T, IntoIter: ExactSizeIterator>,
    what: &'static str,
) -> Result<()> {
    let elements = elements.into_iter();
    array.try_reserve(elements.len()).map_err(|_| Error::OutOfMemory { what })?;
    array.extend(elements);
    Ok(())
}

/// At most `len` elements.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn collected<T>(
    elements: impl Iterator<Item = T>,
    len: usize,
    what: &'static str,
) -> Result<Vec<T>> {
    let mut array = room_for(len, what)?;
    array.extend(elements.take(len));
    Ok(array)
}
