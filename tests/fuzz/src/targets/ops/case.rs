//! An op's call with arrays laid out at random, compared with the same call on dense arrays.

use std::fmt::Debug;

use wgpu_mla::{Backend, Compiled, Device, Error, Kernel, Op};

use super::array::Array;
use crate::Verdict;
use crate::source::Source;

/// Draws numbers of a call, and notes when one of them is broken: then an error is as good as a right result.
pub struct Draw<'s, 'a> {
    pub source: &'s mut Source<'a>,
    pub is_broken: bool,
}

/// How many of 256 numbers of a call are broken.
const BROKEN: u8 = 3;

impl Draw<'_, '_> {
    /// A number, in bounds but for the broken ones.
    pub fn number(&mut self, first: u32, last: u32) -> u32 {
        let good = self.source.between(first, last);
        if self.source.chance(BROKEN) {
            self.is_broken = true;
            return self.source.hostile();
        }
        good
    }

    /// A factor, one of those that every backend takes but for the broken ones.
    pub fn factor(&mut self) -> f32 {
        const BAD: [f32; 10] = [
            0.0,
            -0.0,
            -1.0,
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            1e-45,
            1e-39,
            f32::MAX,
            f32::MIN_POSITIVE,
        ];
        let good = self.source.pick(&[1.0, 0.5, 0.117, 3.0]);
        if self.source.chance(BROKEN) {
            self.is_broken = true;
            return self.source.pick(&BAD);
        }
        good
    }

    /// A factor of elements that are codes, or else 1 but for the broken ones.
    pub fn code_factor(&mut self, is_codes: bool) -> f32 {
        let factor = self.factor();
        if is_codes || self.is_broken { factor } else { 1.0 }
    }
}

/// An op that can be drawn.
pub trait Case: Op {
    /// A call's input and scalars.
    type Call: Debug;

    /// Draws a spec, from one of its samples, and a call.
    fn draw(draw: &mut Draw<'_, '_>) -> (Self, Self::Call);

    /// The arrays of a call, not laid out.
    fn arrays(&self, call: &Self::Call) -> Vec<Array>;

    /// A call's arguments on arrays that are laid out, with a handle for each.
    fn args<B: Copy>(&self, call: &Self::Call, arrays: &[Array], at: &[B]) -> Result<Self::Args<B>, Error>;

    /// What the op is compiled with.
    fn options(&self, _: &Self::Call) -> Self::Options {
        Self::Options::default()
    }

    /// Hands over a call's input.
    fn with_input<R>(
        &self,
        facts: &Self::Facts,
        call: &Self::Call,
        then: impl FnOnce(Result<Self::Input<'_>, Error>) -> R,
    ) -> R;

    /// Whether a call may write this row of an array that it writes.
    fn touches(&self, call: &Self::Call, array: usize, row: [u64; 3]) -> bool;

    /// Puts arrays where the op allows them to be beside what rows and strides say, such as in place.
    fn arrange(&self, _: &mut Source<'_>, _: &mut [Array]) {}
}

/// Bytes of all buffers: more than any case needs that is not broken.
const MOST_BYTES: u64 = 16 << 20;
/// What is between rows: a NaN of every dtype.
const BETWEEN: u8 = 0xFF;

/// Draws a case, runs it, and compares.
///
/// # Panics
/// Where a good call is refused, or what a call wrote is not what it should have.
pub fn run<O: Case, D: Backend + Kernel<O>>(device: &D, source: &mut Source<'_>) -> Verdict {
    let mut draw = Draw { source, is_broken: false };
    let (op, call) = O::draw(&mut draw);
    let mut is_broken = draw.is_broken;
    let mut arrays = op.arrays(&call);
    let rows: u128 = arrays
        .iter()
        .map(|array| array.counts.iter().map(|&count| u128::from(count)).product::<u128>())
        .sum();
    if rows > 1 << 16 {
        // A broken number of tokens or ranks: nothing of that size can be laid out. The call is made with what is there.
        assert!(is_broken, "{op:?} {call:?} is too large");
        for array in &mut arrays {
            array.counts = array.counts.map(|count| count.min(2));
        }
    }
    place(&op, source, &mut arrays);
    is_broken |= spoil(source, &mut arrays);
    let Some(images) = images(source, &arrays) else { return Verdict::Refused };

    let compiled = match device.compile_with(op, &op.options(&call)) {
        Ok(compiled) => compiled,
        Err(Error::NoVariant { why }) if why.contains("it does not serve") => return Verdict::Refused,
        Err(error) => return refused(is_broken, &error, &(op, &call)),
    };
    let after = match call_with(&compiled, &call, &arrays, &images) {
        Ok(after) => after,
        Err(error) => return refused(is_broken, &error, &(op, &call, &arrays)),
    };
    let shown = || format!("{op:?}\n{call:?}\n{arrays:?}");
    for array in &arrays {
        let size = images[array.buffer].len() as u64;
        assert!(array.needs().is_some_and(|needs| needs <= size), "ran outside of a buffer: {}", shown());
    }
    // The same rows, each array dense and in a buffer of its own.
    let mut dense: Vec<Array> = Vec::new();
    for (at, array) in arrays.iter().enumerate() {
        let like = array.like.map(|like| dense[like].strides);
        dense.push(Array { buffer: at, ..array.dense(like) });
    }
    let mut dense_images: Vec<_> = dense.iter().map(|array| vec![BETWEEN; padded(array.bytes)]).collect();
    for (array, to) in arrays.iter().zip(&dense) {
        for row in array.rows() {
            dense_images[to.buffer][to.row(row)].copy_from_slice(&images[array.buffer][array.row(row)]);
        }
    }
    let want = match call_with(&compiled, &call, &dense, &dense_images) {
        Ok(want) => want,
        Err(error) => panic!("dense arrays are refused: {error}: {}", shown()),
    };
    // All that is no row of an array that is written is as it was.
    let mut expected = images;
    for (at, (array, from)) in arrays.iter().zip(&dense).enumerate() {
        let (was, is) = (&dense_images[at], &want[at]);
        if !array.writes {
            assert_eq!(was, is, "array {at} is only read: {}", shown());
            continue;
        }
        for row in array.rows() {
            let bytes = from.row(row);
            if !op.touches(&call, at, row) {
                assert_eq!(was[bytes.clone()], is[bytes.clone()], "row {row:?} of array {at}: {}", shown());
            }
            expected[array.buffer][array.row(row)].copy_from_slice(&is[bytes]);
        }
    }
    for (buffer, (expected, got)) in expected.iter().zip(&after).enumerate() {
        if let Some(at) = (0..expected.len()).find(|&at| expected[at] != got[at]) {
            let (is, want) = (got[at], expected[at]);
            panic!("byte {at} of buffer {buffer} is {is:#x}, not {want:#x}: {}", shown());
        }
    }
    Verdict::Ran
}

fn refused(is_broken: bool, error: &Error, what: &dyn Debug) -> Verdict {
    assert!(is_broken, "a good call is refused: {error}: {what:?}");
    assert!(!matches!(error, Error::Internal { .. }), "{error}: {what:?}");
    Verdict::Refused
}

/// Lays arrays out, in a buffer each, or those that are read with others.
fn place<O: Case>(op: &O, source: &mut Source<'_>, arrays: &mut [Array]) {
    for at in 0..arrays.len() {
        if let Some(like) = arrays[at].like {
            (arrays[at].offset, arrays[at].strides) = (arrays[like].offset, arrays[like].strides);
        } else {
            arrays[at].lay_out(source);
        }
        arrays[at].buffer = at;
        let needs = arrays[at].needs();
        // Mostly exactly as many bytes as are read.
        arrays[at].bytes = needs.unwrap_or(0) + source.pick(&[0, 0, 0, 4, 64]);
        let joins = !arrays[at].writes && !arrays[at].plain && arrays[at].like.is_none() && at > 0;
        if joins && source.chance(64) {
            let other = &arrays[at - 1];
            let is_free = !other.writes && other.like.is_none() && other.holds == arrays[at].holds;
            if let (true, Some(end)) = (is_free, other.needs()) {
                let (buffer, of) = (other.buffer, arrays[at].unit);
                let begin = end.div_ceil(arrays[at].holds.bytes()).next_multiple_of(of.max(1));
                arrays[at].offset += begin;
                arrays[at].buffer = buffer;
                arrays[at].bytes = arrays[at].needs().unwrap_or(0);
            }
        }
    }
    op.arrange(source, arrays);
}

/// Breaks one of the arrays, usually none.
fn spoil(source: &mut Source<'_>, arrays: &mut [Array]) -> bool {
    if !source.chance(64) || arrays.is_empty() {
        return false;
    }
    let (at, other) = (source.index(arrays.len()), source.index(arrays.len()));
    let unit = arrays[at].unit;
    // An array without offset and strides can only be short, or in another's place.
    let kind = if arrays[at].plain { 3 + source.below(2) * 3 } else { source.below(8) };
    match kind {
        0 => arrays[at].offset = source.hostile_u64(),
        1 | 2 => {
            let to = match source.below(4) {
                0 => source.hostile_u64(),
                1 => 0,
                2 => source.below(64),
                _ => source.below(16) * unit,
            };
            let dimensions = if arrays[at].packed { 2 } else { 3 };
            arrays[at].strides[source.index(dimensions)] = to;
        }
        3 | 4 => {
            let less = source.pick(&[1, 4, 8, 1 << 10, u64::MAX]);
            arrays[at].bytes = arrays[at].bytes.saturating_sub(less);
        }
        5 => arrays[at].offset += source.below(9),
        _ => {
            arrays[at].buffer = arrays[other].buffer;
            if source.chance(128) && !arrays[at].plain {
                arrays[at].offset = arrays[other].offset;
            }
        }
    }
    for at in 0..arrays.len() {
        if let Some(like) = arrays[at].like {
            (arrays[at].offset, arrays[at].strides) = (arrays[like].offset, arrays[like].strides);
        }
    }
    true
}

/// Bytes of a buffer, in whole words, of which it has at least one.
fn padded(bytes: u64) -> usize {
    bytes.max(1).next_multiple_of(4) as usize
}

/// What each buffer holds before the call; None where they are too large to be made.
fn images(source: &mut Source<'_>, arrays: &[Array]) -> Option<Vec<Vec<u8>>> {
    let mut sizes = vec![0u64; arrays.len()];
    for array in arrays {
        sizes[array.buffer] = sizes[array.buffer].max(array.bytes);
    }
    if sizes.iter().fold(0u64, |sum, &size| sum.saturating_add(size)) > MOST_BYTES {
        return None;
    }
    let mut images: Vec<_> = sizes.iter().map(|&size| vec![BETWEEN; padded(size)]).collect();
    let mut rng = source.rng();
    for array in arrays {
        let image = &mut images[array.buffer];
        if array.needs().is_some_and(|needs| needs <= image.len() as u64) {
            array.fill(&mut rng, image);
        }
    }
    Some(images)
}

/// Makes the buffers, calls the op, and gives what they hold then.
fn call_with<O: Case, D: Device + Kernel<O>>(
    op: &Compiled<O, D>,
    call: &O::Call,
    arrays: &[Array],
    images: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, Error> {
    let device = op.device();
    let buffers: Vec<_> = images
        .iter()
        .map(|image| {
            let buffer = device.buffer(image.len() as u64).expect("a small buffer");
            device.upload(&buffer, 0, image).expect("uploaded");
            buffer
        })
        .collect();
    let at: Vec<_> = arrays.iter().map(|array| &buffers[array.buffer]).collect();
    let args = op.op().args(call, arrays, &at)?;
    let mut step = op.step(O::Capacity::default())?;
    op.op().with_input(op.facts(), call, |input| op.prepare(&mut step, input?))?;
    let binding = op.bind(&args, step.used())?;
    op.run(&step, &binding)?;
    Ok(images
        .iter()
        .zip(&buffers)
        .map(|(image, buffer)| device.download(buffer, image.len() as u64).expect("downloaded"))
        .collect())
}
