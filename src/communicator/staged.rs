//! Exchanges of device buffers through the host, for every engine that carries host bytes.

use super::{Communicator, Exchange, check_world};
use crate::base::dtype::Dtype;
use crate::base::error::{Error, Result};
use crate::base::view::fits;
use crate::ops::Device;

/// An all-to-all by an all-gather: every rank gets all parts and keeps its own, for `world` times the bytes.
pub(super) fn all_to_all_by_gather<D: Device, C: Communicator<D> + ?Sized>(
    communicator: &C,
    parts: &[u8],
) -> Result<Vec<u8>> {
    let (rank, world) = place(communicator)?;
    let part = part_bytes(world, parts.len())?;
    let all = gather(communicator, parts)?;
    let mine = rank as usize * part;
    Ok(all.chunks(parts.len().max(1)).map(|of_rank| &of_rank[mine..mine + part]).collect::<Vec<_>>().concat())
}

pub(super) fn all_gather<D: Device, C: Communicator<D> + ?Sized>(
    communicator: &C,
    device: &D,
    exchanges: &[Exchange<&D::Buffer>],
) -> Result<()> {
    let (_, world) = place(communicator)?;
    check::<D>(exchanges, 1, world.into())?;
    let mut mine = Vec::new();
    for exchange in exchanges {
        mine.extend(device.download(exchange.from, exchange.bytes)?);
    }
    let all = gather(communicator, &mine)?;
    unpack(device, exchanges, &all, mine.len())
}

pub(super) fn all_to_all<D: Device, C: Communicator<D> + ?Sized>(
    communicator: &C,
    device: &D,
    exchanges: &[Exchange<&D::Buffer>],
) -> Result<()> {
    let (_, world) = place(communicator)?;
    check::<D>(exchanges, world.into(), world.into())?;
    let arrays = exchanges
        .iter()
        .map(|exchange| device.download(exchange.from, exchange.bytes * u64::from(world)))
        .collect::<Result<Vec<_>>>()?;
    let mut parts = Vec::with_capacity(arrays.iter().map(Vec::len).sum());
    for rank in 0..world as usize {
        for (exchange, array) in exchanges.iter().zip(&arrays) {
            let bytes = exchange.bytes as usize;
            parts.extend_from_slice(&array[rank * bytes..][..bytes]);
        }
    }
    let got = same_length("all_to_all", communicator, communicator.all_to_all_host(&parts)?, parts.len())?;
    unpack(device, exchanges, &got, parts.len() / world as usize)
}

pub(super) fn reduce_scatter<D: Device, C: Communicator<D> + ?Sized>(
    communicator: &C,
    device: &D,
    exchange: &Exchange<&D::Buffer>,
    dtype: Dtype,
) -> Result<()> {
    check_sum(dtype, exchange.bytes)?;
    let (_, world) = place(communicator)?;
    check::<D>(std::slice::from_ref(exchange), world.into(), 1)?;
    let parts = device.download(exchange.from, exchange.bytes * u64::from(world))?;
    let got = communicator.all_to_all_host(&parts)?;
    let got = same_length("reduce_scatter", communicator, got, parts.len())?;
    device.upload(exchange.to, 0, &sum(dtype, &got, exchange.bytes as usize))
}

/// # Errors
/// [`Error::DtypeUnsupported`] for codes, which have no sum.
pub(super) fn check_sum(dtype: Dtype, bytes: u64) -> Result<()> {
    if dtype.is_fp8() {
        let cure = "sums are of f32, f16 or bf16";
        return Err(Error::DtypeUnsupported { what: "reduce_scatter", got: dtype, cure });
    }
    crate::base::view::aligned("reduce_scatter bytes", bytes, dtype.bytes() as u64)
}

/// # Errors
/// [`Error::Alignment`] and [`Error::BufferTooSmall`], for buffers of so many parts.
pub(super) fn check<D: Device>(exchanges: &[Exchange<&D::Buffer>], from: u64, to: u64) -> Result<()> {
    for exchange in exchanges {
        if !exchange.bytes.is_multiple_of(4) {
            return Err(Error::Alignment { what: "exchange", got: exchange.bytes, of: 4, unit: "bytes" });
        }
        fits("exchange from", exchange.bytes.saturating_mul(from), D::size(exchange.from))?;
        fits("exchange to", exchange.bytes.saturating_mul(to), D::size(exchange.to))?;
        if D::offset(exchange.from, exchange.to).is_some() {
            return Err(Error::Aliased { a: "exchange from", b: "exchange to" });
        }
    }
    Ok(())
}

/// Checks the rank and world that a host's engine reports.
///
/// # Errors
/// [`Error::Shape`] for a group of no ranks or too many, or a rank that is not in it.
fn place<D: Device, C: Communicator<D> + ?Sized>(communicator: &C) -> Result<(u32, u32)> {
    let (rank, world) = (communicator.rank(), communicator.world());
    check_world(world)?;
    if rank >= world {
        let cure = "must be below its world: correct the engine's rank() or world()";
        return Err(Error::Shape { what: "rank of the communicator", got: rank.into(), cure });
    }
    Ok((rank, world))
}

/// Copies the `message` bytes of each rank into the buffers of the exchanges.
fn unpack<D: Device>(
    device: &D,
    exchanges: &[Exchange<&D::Buffer>],
    all: &[u8],
    message: usize,
) -> Result<()> {
    let mut at = 0;
    for exchange in exchanges {
        let bytes = exchange.bytes as usize;
        let parts: Vec<_> = all.chunks(message.max(1)).map(|of_rank| &of_rank[at..at + bytes]).collect();
        device.upload(exchange.to, 0, &parts.concat())?;
        at += bytes;
    }
    Ok(())
}

fn gather<D: Device, C: Communicator<D> + ?Sized>(communicator: &C, mine: &[u8]) -> Result<Vec<u8>> {
    let want = mine.len() * communicator.world() as usize;
    same_length("all_gather", communicator, communicator.all_gather_host(mine)?, want)
}

/// Checks the length that a host's engine returns: with other bytes results would be wrong.
fn same_length<D: Device, C: Communicator<D> + ?Sized>(
    what: &'static str,
    communicator: &C,
    got: Vec<u8>,
    want: usize,
) -> Result<Vec<u8>> {
    if got.len() != want {
        let detail = format!("{} bytes came back, not {want}: the ranks pass different sizes", got.len());
        return Err(Error::Exchange { what, rank: communicator.rank(), detail });
    }
    Ok(got)
}

/// # Errors
/// [`Error::Shape`] for what is no equal part a rank.
pub(super) fn part_bytes(world: u32, bytes: usize) -> Result<usize> {
    let world = world.max(1) as usize;
    if !bytes.is_multiple_of(world) {
        let (what, got) = ("all_to_all bytes", bytes as u64);
        return Err(Error::Shape { what, got, cure: "must be as many for each rank" });
    }
    Ok(bytes / world)
}

/// The sum of parts of `bytes` bytes, in f64, rounded at the end.
fn sum(dtype: Dtype, parts: &[u8], bytes: usize) -> Vec<u8> {
    let mut sums = vec![0f64; bytes / dtype.bytes()];
    for part in parts.chunks(bytes.max(1)) {
        let values = dtype.decode_all(part);
        sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += f64::from(x));
    }
    dtype.encode_all(&sums.iter().map(|&x| x as f32).collect::<Vec<_>>())
}
