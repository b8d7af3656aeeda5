//! Loads the model, compiles its attention on egui's device.

use std::path::Path;
use std::sync::Arc;

use generate::attention::Attention;
use generate::{Checkpoint, Error, Model, Result, Setup, Text};
use wgpu_mla::gpu::Gpu;
use wgpu_mla::{Device, Dtype, KvSpec, MlaDecode};

use crate::compiled;
use crate::pace::DECODED;
use crate::sequence::Sequence;
use crate::shared::{Shared, lock};
use crate::shown::{About, DtypeShown, PagesShown, Phase};
use crate::slice::Slices;
use crate::writer::Writer;

/// Small pages, since a page of the cache is something to look at here.
const PAGE_SIZE: u32 = 16;
/// 128 pages with one more for each sequence.
const CACHE_TOKENS: u32 = 1920;
pub const MOST_SEQUENCES: usize = 8;
const STEP_TOKENS: u32 = 256;

/// The checkpoint and its tokenizer.
///
/// # Errors
/// [`generate::Error::File`].
pub fn checkpoint(shared: &Shared, gpu: &Gpu, dir: &Path) -> Result<(Arc<Checkpoint>, Text)> {
    shared.show(|shown| shown.phase = Phase::Loading);
    let checkpoint = Checkpoint::open(dir)?;
    let text = checkpoint.tokenizer()?;
    let config = &checkpoint.model.config;
    let vocabulary =
        (0..config.vocab_size as u32).map(|token| text.decode(&[token])).collect::<Result<_>>()?;
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::E4m3];
    let dtypes = dtypes.map(|dtype| DtypeShown { dtype, lacks: lacks(gpu, &checkpoint.model, dtype) });
    shared.show(|shown| {
        (shown.vocabulary, shown.dtypes) = (Arc::new(vocabulary), dtypes.to_vec());
    });
    Ok((Arc::new(checkpoint), text))
}

/// What keeps the device from a cache of this dtype.
fn lacks(gpu: &Gpu, model: &Model, dtype: Dtype) -> Option<String> {
    let kv = KvSpec { layout: dtype.into(), page_size: PAGE_SIZE, num_pages: 1 };
    let spec = MlaDecode { shape: model.config.shape, kv, query: Dtype::F32, out: Dtype::F32 };
    let variants = gpu.variants(&spec);
    match variants.iter().any(|variant| variant.lacks.is_none()) {
        true => None,
        false => Some(
            variants
                .last()
                .and_then(|last| last.lacks.as_ref())
                .map_or("no kernel".into(), |it| it.to_string()),
        ),
    }
}

/// Compiles the attention for a cache of this dtype.
///
/// # Errors
/// The errors of the device.
pub(crate) fn slices(writer: &mut Writer, kv: Dtype) -> Result<Slices> {
    let (shared, model) = (writer.shared.clone(), &writer.checkpoint.model);
    compiled::restart();
    shared.show(|shown| {
        shown.phase = Phase::Compiling;
        (shown.about, shown.weights) = (None, None);
        shown.sequences.clear();
    });
    let setup = Setup {
        kv: kv.into(),
        page_size: PAGE_SIZE,
        tokens: CACHE_TOKENS,
        sequences: MOST_SEQUENCES as u32,
        step_tokens: STEP_TOKENS,
        decode_threshold: DECODED as u32,
        workspace_bytes: 8 << 20,
        k_scales: writer.checkpoint.k_scales.clone(),
        ..Setup::default()
    };
    if setup.is_sparse(model) {
        let why = "the model's layers attend a part of a long text, and the window shows softmax weights of all of it";
        return Err(Error::Input(format!("{why}: use `generate`")));
    }
    let slices = Slices::new(&writer.gpu, model, &setup)?;
    warm_up(&slices, model)?;
    let paged = lock(&slices.paged);
    let info = writer.gpu.device().adapter_info();
    let scales = writer.checkpoint.scales_notice(kv.into());
    if let Some(notice) = scales {
        eprintln!("desktop: {kv} cache: {notice}");
    }
    let about = About {
        name: format!("{}, {:?}", info.name, info.backend),
        adapter: writer.gpu.describe(),
        variant: paged.layer().variant(),
        rounds: paged.layer().rounds_weights(),
        why: paged.layer().why().to_owned(),
        kv,
        scales,
        slice: String::new(),
    };
    drop(paged);
    shared.show(|shown| shown.about = Some(about));
    Ok(slices)
}

/// Drivers finish a kernel when it first runs: here, by submits of this thread before there are slices, and not in a frame.
fn warm_up(slices: &Slices, model: &Model) -> Result<()> {
    let mut paged = lock(&slices.paged);
    let id = paged.pages_mut().add();
    for tokens in [2 * DECODED, DECODED, 1] {
        paged.begin(&[(id, tokens as u32)])?;
        model.step(&vec![0; tokens], &[0], &mut *paged)?;
    }
    let other = paged.pages_mut().fork(id)?;
    paged.begin(&[(id, 1), (other, 1)])?;
    model.step(&[0, 0], &[0], &mut *paged)?;
    slices.warm_up(&paged)?;
    paged.pages_mut().free(id)?;
    paged.pages_mut().free(other)
}

/// Who has which pages.
pub fn pages(slices: &Slices, sequences: &[Sequence]) -> PagesShown {
    let paged = lock(&slices.paged);
    let (pages, spec) = (paged.pages(), paged.pages().spec());
    let table = |sequence: &Sequence| {
        // It fails only for a sequence that is not there.
        let ids = pages.of(sequence.id).unwrap_or_default();
        (sequence.number, sequence.cached, ids.to_vec())
    };
    PagesShown {
        page_size: spec.page_size as usize,
        num_pages: spec.num_pages as usize,
        tables: sequences.iter().map(table).collect(),
    }
}
