//! What is kept between runs and sent between ranks: the disk cache of pipelines, `Shares`, and digests of steps.

use std::path::PathBuf;
use std::sync::OnceLock;

use wgpu_mla::communicator::{Communicator, StepDigest};
use wgpu_mla::cpu::Cpu;
use wgpu_mla::gpu::disk_cache::{DiskCache, Status};
use wgpu_mla::{Batch, Device, Error, Mask, Shares, gpu};

use crate::source::Source;
use crate::{Target, Verdict};

/// The target.
pub const TARGET: Target = Target {
    name: "state",
    about: "files of the disk cache, shares, and digests of steps",
    run,
    seeds: Vec::new,
    least_ran: 30,
    longest: 512,
    memory: 256 << 20,
};

fn run(input: &[u8]) -> Verdict {
    let mut source = Source::new(input);
    match source.below(8) {
        0 => disk_cache(&mut source),
        1..=4 => shares(&mut source),
        _ => digest(&mut source),
    }
}

/// A device that keeps pipelines, its folder, and a file that it wrote.
struct Disk {
    device: wgpu_mla::wgpu::Device,
    folder: PathBuf,
    path: PathBuf,
    good: Vec<u8>,
}

fn disk() -> &'static Disk {
    static DISK: OnceLock<Disk> = OnceLock::new();
    DISK.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("mla-fuzz-cache-{}", std::process::id()));
        let gpu = mla_support::gpu().unwrap_or_else(|why| panic!("no GPU: {why:?}"));
        let device = gpu.device().clone();
        let cache = DiskCache::open(&device, &folder);
        assert_ne!(*cache.status(), Status::Unsupported, "the device keeps no pipelines");
        let setup = gpu::Setup { disk_cache: Some(&folder), ..gpu::Setup::default() };
        let adapter = gpu.adapter().expect("an adapter").clone();
        let kept = gpu::Gpu::with(&adapter, &device, gpu.queue(), &setup);
        let kv = wgpu_mla::KvSpec { layout: wgpu_mla::Dtype::F32.into(), page_size: 1, num_pages: 1 };
        let shape = wgpu_mla::MlaShape { num_heads: 1, kv_lora_rank: 256, qk_rope_head_dim: 32 };
        kept.compile(wgpu_mla::KvCopyPages { shape, kv }).expect("a pipeline");
        assert!(kept.save().expect("saved"), "nothing was written");
        let path = cache.path().to_owned();
        let good = std::fs::read(&path).expect("the file");
        Disk { device, folder, path, good }
    })
}

/// A damaged file is not handed to the driver; the one that was written is.
fn disk_cache(source: &mut Source<'_>) -> Verdict {
    let Disk { device, folder, path, good } = disk();
    let mut file = good.clone();
    for _ in 0..source.below(4) {
        let at = source.below(file.len() as u64 + 1) as usize;
        match source.below(4) {
            0 => file.truncate(at),
            1 => {
                let new = [source.byte(); 3];
                file.splice(at..at, new);
            }
            _ => {
                // The header is where most checks are.
                let at = if source.chance(128) { at % 64 } else { at };
                if let Some(byte) = file.get_mut(at) {
                    *byte ^= source.byte();
                }
            }
        }
    }
    std::fs::write(path, &file).expect("written");
    let cache = DiskCache::open(device, folder);
    let is_good = file == *good;
    match cache.status() {
        Status::Loaded { .. } => assert!(is_good, "a damaged file was loaded"),
        Status::Rejected(why) => assert!(!is_good && !why.to_string().is_empty(), "{why}"),
        status => panic!("{status:?}"),
    }
    assert!(cache.as_wgpu().is_some(), "a cache that works");
    if is_good { Verdict::Ran } else { Verdict::Refused }
}

/// Shares against a walk over the tokens.
fn shares(source: &mut Source<'_>) -> Verdict {
    let any =
        |source: &mut Source<'_>| if source.chance(12) { source.hostile() } else { source.between(0, 9) };
    let interleave = any(source);
    let made = if source.chance(64) {
        Shares::even(any(source), interleave)
    } else {
        let weights: Vec<u32> = (0..source.below(7)).map(|_| any(source)).collect();
        Shares::weighted(&weights, interleave)
    };
    let Ok(shares) = made else { return Verdict::Refused };
    let world = shares.world();
    let ranks: Vec<u32> = (0..world).take(16).collect();
    assert!(shares.local_len(world, 1).is_err() && shares.token(world, 0).is_err());
    let mut held = vec![0u32; world as usize];
    for token in 0..source.between(0, 120) {
        let rank = shares.owner(token);
        let index = shares.local_index(token);
        assert_eq!(
            (index, shares.token(rank, index)),
            (held[rank as usize], Ok(token)),
            "token {token}: {shares:?}"
        );
        held[rank as usize] += 1;
        for &rank in &ranks {
            assert_eq!(shares.local_len(rank, token + 1), Ok(held[rank as usize]), "{shares:?}");
        }
    }
    // Anywhere.
    let (begin, tokens) = (source.hostile(), source.hostile());
    let end = begin.saturating_add(tokens);
    let (mut total, padded) = (0u64, shares.padded_len(begin, tokens));
    for rank in 0..world {
        let range = shares.local_range(rank, begin, tokens).expect("a rank");
        assert_eq!(
            (Ok(range.start), Ok(range.end)),
            (shares.local_len(rank, begin), shares.local_len(rank, end))
        );
        assert!(range.start <= range.end && range.end - range.start <= padded);
        total += u64::from(range.end - range.start);
    }
    assert_eq!(total, u64::from(end - begin), "{shares:?}, {begin} to {end}");
    let rank = shares.owner(begin);
    assert_eq!(shares.token(rank, shares.local_index(begin)), Ok(begin), "{shares:?}");
    let _ = shares.token(source.below(world.into()) as u32, source.hostile());
    batch(source, &shares)
}

/// A rank's part of a batch.
fn batch(source: &mut Source<'_>, shares: &Shares) -> Verdict {
    let (mut lens, mut starts) = (Vec::new(), vec![0]);
    let mut is_broken = false;
    for _ in 0..source.below(5) {
        let queries = source.between(0, 4) as i32;
        let len = source.between(0, 60) as i32;
        lens.push(len);
        starts.push(starts[starts.len() - 1] + queries);
    }
    if source.chance(32) && !lens.is_empty() {
        is_broken = true;
        let at = source.index(lens.len());
        if source.chance(128) {
            lens[at] = source.hostile() as i32
        } else {
            starts[at + 1] = source.hostile() as i32
        }
    }
    let total = starts[starts.len() - 1] as usize;
    let mut owners = vec![0; total.min(1 << 10)];
    for rank in (0..shares.world()).take(16) {
        let (Ok(local), Ok(bounds), Ok(appends)) = (
            shares.local_seq_lens(rank, &lens),
            shares.local_bounds(rank, &lens, &starts),
            shares.local_appends(rank, &lens, &starts),
        ) else {
            assert!(is_broken, "a good batch is refused: {lens:?} {starts:?} {shares:?}");
            return Verdict::Refused;
        };
        if is_broken {
            continue;
        }
        let mut slots = Vec::new();
        for (seq, range) in appends.iter().enumerate() {
            assert_eq!(range.end as i32, local[seq]);
            slots.extend(range.clone().map(|token| 1000 * seq as i64 + i64::from(token)));
        }
        let mapped = match shares.slot_mapping(rank, &lens, &starts, &slots) {
            Ok(mapped) => mapped,
            Err(error) => panic!("{error}: rank {rank} of {shares:?}: {lens:?} {starts:?}"),
        };
        assert_eq!((mapped.len(), bounds.len()), (total, total));
        let mut next = slots.iter();
        for (seq, &len) in lens.iter().enumerate() {
            let queries = starts[seq + 1] - starts[seq];
            for i in 0..queries {
                let token = (starts[seq] + i) as usize;
                let position = i64::from(len) - i64::from(queries) + i64::from(i);
                let want = u32::try_from(position)
                    .map_or(0, |position| shares.local_len(rank, position + 1).expect("a rank"));
                assert_eq!(
                    bounds[token], want,
                    "query {token} of rank {rank}: {lens:?} {starts:?} {shares:?}"
                );
                let is_own = u32::try_from(position).is_ok_and(|position| shares.owner(position) == rank);
                owners[token] += i32::from(is_own);
                assert_eq!(mapped[token], if is_own { *next.next().expect("a slot") } else { -1 });
            }
        }
    }
    if is_broken { Verdict::Refused } else { Verdict::Ran }
}

/// Ranks whose bytes are those of this one, as the source changes them.
#[derive(Debug)]
struct Changed {
    world: u32,
    change: Vec<(usize, u8)>,
    cut: usize,
}

impl<D: Device> Communicator<D> for Changed {
    fn rank(&self) -> u32 {
        0
    }

    fn world(&self) -> u32 {
        self.world
    }

    fn all_gather_host(&self, mine: &[u8]) -> Result<Vec<u8>, Error> {
        let mut all = mine.repeat(self.world as usize);
        // A rank's own place is the first field.
        for rank in 0..self.world as usize {
            all[rank * mine.len() + 1] = rank as u8;
        }
        for &(at, by) in &self.change {
            let at = at % all.len();
            all[at] ^= by;
        }
        all.truncate(all.len() - self.cut.min(all.len()));
        Ok(all)
    }
}

/// Equal digests agree, and no others.
fn digest(source: &mut Source<'_>) -> Verdict {
    let lens: Vec<i32> = (0..source.below(4)).map(|_| source.hostile() as i32).collect();
    let starts: Vec<i32> = (0..=lens.len() as i32).collect();
    let bounds = vec![source.hostile(); lens.len()];
    let first = source.hostile().into();
    let mask = source.pick(&[Mask::Causal, Mask::Full, Mask::CausalFrom(first), Mask::Bounds(&bounds)]);
    let digest =
        StepDigest::new().step(source.hostile().into()).batch(&Batch { mask, ..Batch::new(&lens, &starts) });
    let world = source.between(1, 5);
    // Bytes that say only whether a field is known may be any but 0.
    let change: Vec<_> = (0..source.below(3)).map(|_| (source.hostile() as usize, source.byte())).collect();
    let cut = if source.chance(32) { source.index(40) } else { 0 };
    let changed = Changed { world, change, cut };
    let is_changed = cut > 0 || changed.change.iter().any(|&(_, by)| by != 0);
    match digest.agree::<Cpu>(&changed) {
        Ok(()) => Verdict::Ran,
        Err(error) => {
            assert!(is_changed, "equal digests differ: {error}");
            assert!(!matches!(error, Error::Internal { .. }), "{error}");
            Verdict::Refused
        }
    }
}
