//! One case on one backend: upload, run, time, download, check, save.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use wgpu_mla::any::{AnyBackend, Buffer};
use wgpu_mla::{
    Batch, Capacity, Compiled, DecodeOptions, Device, Dtype, Error, KvAppendArgs, KvView, Mask,
    MergeStateArgs, MlaDecode, MlaDecodeArgs, PageTable, Plan, Result, SplitPolicy, View,
};

use crate::check::{self, Verdict, dtypes};
use crate::files;
use crate::index_logits;
use crate::indexer;
use crate::ranks;
use crate::report::{End, Row};
use crate::sparse;
use crate::top_k;
use mla_support::case::{AppendCase, Case, DecodeCase, MergeCase, Saved, save};

/// Runs cases. Compiled ops are kept for later cases of the same spec.
pub struct Runner<'a> {
    pub backend: &'a AnyBackend,
    variant: Option<&'a str>,
    save: Option<&'a Path>,
    /// Compiled once a spec, `topk`, and with or without sinks.
    decodes: HashMap<(MlaDecode, u32, bool), Rc<Compiled<MlaDecode, AnyBackend>>>,
    /// Why the last decode's variant was chosen.
    why: Option<String>,
    saved: HashSet<PathBuf>,
}

/// The result of a case.
pub struct Ran {
    pub seconds: f64,
    pub variant: &'static str,
    pub verdict: Verdict,
    pub computed: Vec<Saved>,
}

impl<'a> Runner<'a> {
    pub fn new(backend: &'a AnyBackend, variant: Option<&'a str>, save: Option<&'a Path>) -> Self {
        Self { backend, variant, save, decodes: HashMap::new(), why: None, saved: HashSet::new() }
    }

    /// Why the variant of the last decode that ran was chosen.
    pub fn why(&self) -> Option<&str> {
        self.why.as_deref()
    }

    /// Compiles the first decode ahead of its turn, to say which variant it gets.
    pub fn why_of_first_decode(&mut self, files: &[PathBuf]) -> Option<String> {
        let first = files.iter().find_map(|file| match files::load(file) {
            Ok(Case::Decode(case)) => Some(case.spec),
            Ok(Case::DcpDecode(case)) => Some(case.decode.spec),
            _ => None,
        })?;
        Some(match self.decode(&first) {
            Ok(_) => self.why.take()?,
            Err(error) => error.to_string(),
        })
    }

    /// Runs a case file.
    pub fn run(&mut self, name: &str, file: &Path) -> Row {
        let case = match files::load(file) {
            Ok(case) => case,
            Err(why) => return Row::unreadable(name, why),
        };
        let (kind, shape, bytes, ran) = match &case {
            Case::Decode(case) => ("decode", decode_shape(case), decode_bytes(case), self.run_decode(case)),
            Case::Merge(case) => {
                ("merge", merge_shape(case), merge_bytes(case), run_merge(self.backend, case))
            }
            Case::Append(case) => {
                ("append", append_shape(case), append_bytes(case), run_append(self.backend, case))
            }
            Case::Sparse(case) => {
                ("sparse", sparse::shape(case), sparse::bytes(case), sparse::run(self, case))
            }
            Case::TopK(case) => {
                ("top_k", top_k::shape(case), top_k::bytes(case), top_k::run(self.backend, case))
            }
            Case::DcpDecode(case) => {
                let (shape, bytes) = (ranks::dcp_decode_shape(case), decode_bytes(&case.decode));
                ("dcp_decode", shape, bytes, ranks::run_decode(self, case))
            }
            Case::DcpCombine(case) => {
                let (shape, bytes) = (ranks::combine_shape(case), ranks::combine_bytes(case));
                ("dcp_combine", shape, bytes, ranks::run_combine(self.backend, case))
            }
            Case::IndexAppend(case) => {
                let (shape, bytes) = (indexer::append_shape(case), indexer::append_bytes(case));
                ("indexer_append", shape, bytes, indexer::run_append(self.backend, case))
            }
            Case::IndexQuery(case) => {
                let (shape, bytes) = (indexer::query_shape(case), indexer::query_bytes(case));
                ("indexer_query", shape, bytes, indexer::run_query(self.backend, case))
            }
            Case::IndexLogits(case) => {
                let (shape, bytes) = (index_logits::shape(case), index_logits::bytes(case));
                ("indexer_logits", shape, bytes, index_logits::run(self.backend, case))
            }
        };
        let mut row = Row {
            name: name.to_owned(),
            kind,
            shape,
            variant: "-",
            seconds: None,
            bytes,
            error: "-".into(),
            end: End::Fail,
            why: None,
        };
        match ran {
            Ok(ran) => {
                (row.variant, row.seconds, row.error) = (ran.variant, Some(ran.seconds), ran.verdict.error);
                row.why = ran.verdict.failure.or(self.save(file, &ran.computed).err());
                row.end = if row.why.is_none() { End::Pass } else { End::Fail };
            }
            Err(error) => {
                row.end = if is_not_served(&error) { End::NotServed } else { End::Fail };
                row.why = Some(error.to_string());
            }
        }
        row
    }

    /// Writes `DIRECTORY/<case>.safetensors`, but never over a case or over another case's results.
    fn save(&mut self, file: &Path, computed: &[Saved]) -> std::result::Result<(), String> {
        let Some(directory) = self.save else { return Ok(()) };
        let mut path = directory.join(file.file_stem().unwrap_or(file.as_os_str()));
        path.as_mut_os_string().push(".safetensors");
        if std::fs::canonicalize(&path).is_ok_and(|at| std::fs::canonicalize(file).is_ok_and(|of| of == at)) {
            return Err(format!("not saved: {} is the case itself", path.display()));
        }
        if !self.saved.insert(path.clone()) {
            return Err(format!("not saved: {} holds another case of this name", path.display()));
        }
        save(&path, computed).map_err(|error| format!("not saved: {error}"))
    }

    pub fn decode(&mut self, spec: &MlaDecode) -> Result<Rc<Compiled<MlaDecode, AnyBackend>>> {
        self.decode_with(spec, 0, false)
    }

    /// Over lists of `topk` slots unless that is 0, and perhaps with sinks.
    pub fn decode_with(
        &mut self,
        spec: &MlaDecode,
        topk: u32,
        attn_sink: bool,
    ) -> Result<Rc<Compiled<MlaDecode, AnyBackend>>> {
        let key = (*spec, topk, attn_sink);
        let decode = match self.decodes.get(&key) {
            Some(decode) => decode.clone(),
            None => {
                let variant = self.variant.map(Into::into);
                let options = DecodeOptions { variant, topk, attn_sink, ..Default::default() };
                Rc::new(self.backend.compile_with(*spec, &options)?)
            }
        };
        self.why = Some(format!("variant {}", decode.why()));
        self.decodes.insert(key, decode.clone());
        Ok(decode)
    }

    fn run_decode(&mut self, case: &DecodeCase) -> Result<Ran> {
        let (backend, spec) = (self.backend, &case.spec);
        let decode = self.decode(spec)?;
        let batch = Batch {
            mask: if case.causal { Mask::Causal } else { Mask::Full },
            ..Batch::new(&case.seq_lens, &case.query_start_loc)
        };
        let plan = Plan::new(spec, &decode.tiling(), &batch, SplitPolicy::Auto)?;
        let mut step = decode.step(Capacity::of(&plan))?;
        let pages = PageTable::Dense { block_table: &case.block_table, max_pages: case.max_pages as u32 };
        decode.prepare(&mut step, (&plan, pages))?;

        let (q, kv) = (upload(backend, &case.q)?, upload(backend, &case.kv_cache)?);
        let (out, lse) = (poisoned(backend, case.out.len() * 4)?, poisoned(backend, case.lse.len() * 4)?);
        let dense = MlaDecodeArgs::dense(spec, &q, &kv, &out, &lse, case.softmax_scale);
        let layer = MlaDecodeArgs { k_scale: case.k_scale, q_scale: case.q_scale, ..dense };
        let binding = decode.bind(&layer, plan.num_queries)?;
        let seconds = time(backend, || decode.run(&step, &binding))?;

        let out = Dtype::F32.decode_all(&backend.download(&out, case.out.len() as u64 * 4)?);
        let lse = Dtype::F32.decode_all(&backend.download(&lse, case.lse.len() as u64 * 4)?);
        let variant = decode.variant();
        let verdict = check::decode(case, decode.rounds_weights(), &out, &lse);
        let (tokens, heads) = (plan.num_queries as usize, spec.shape.num_heads as usize);
        let computed = vec![
            Saved::f32s("out", &[tokens, heads, spec.shape.kv_lora_rank as usize], &out),
            Saved::f32s("lse", &[tokens, heads], &lse),
        ];
        Ok(Ran { seconds, variant, verdict, computed })
    }
}

/// Whether a backend or a forced variant says that it has no kernel for a layout or an optional input.
fn is_not_served(error: &Error) -> bool {
    match error {
        Error::LayoutUnsupported { .. } => true,
        Error::NoVariant { why } | Error::VariantUnavailable { why, .. } => why.contains("it does not serve"),
        _ => false,
    }
}

fn run_merge(backend: &AnyBackend, case: &MergeCase) -> Result<Ran> {
    let (tokens, heads, size) = (case.num_tokens, case.num_heads, case.spec.head_size);
    let logs = |lse: &[f32]| upload(backend, &Dtype::F32.encode_all(lse));
    let (prefix, suffix) = (upload(backend, &case.prefix_output)?, upload(backend, &case.suffix_output)?);
    let (prefix_lse, suffix_lse) = (logs(&case.prefix_lse)?, logs(&case.suffix_lse)?);
    let output_bytes = case.prefix_output.len();
    let output = poisoned(backend, output_bytes)?;
    let output_lse = poisoned(backend, tokens * heads * 4)?;
    let args = MergeStateArgs {
        prefix_output: View::dense(&prefix, heads as u32, size),
        prefix_lse: by_head(&prefix_lse, tokens),
        suffix_output: View::dense(&suffix, heads as u32, size),
        suffix_lse: by_head(&suffix_lse, tokens),
        output: View::dense(&output, heads as u32, size),
        output_lse: Some(by_head(&output_lse, tokens)),
        num_tokens: tokens as u32,
        num_heads: heads as u32,
        output_scale: 1.0,
    };
    let merge = backend.compile(case.spec)?;
    let (step, binding) = (merge.step(())?, merge.bind(&args, ())?);
    let seconds = time(backend, || merge.run(&step, &binding))?;

    let bytes = download(backend, &output, output_bytes)?;
    let lse = Dtype::F32.decode_all(&download(backend, &output_lse, tokens * heads * 4)?);
    let verdict = check::merge(case, &bytes, &lse);
    // The values are compared as f32, which holds every f16 and bf16; the expected output is f32 too.
    let values = case.spec.dtype.decode_all(&bytes);
    let computed = vec![
        Saved::f32s("output", &[tokens, heads, size as usize], &values),
        Saved::f32s("output_lse", &[heads, tokens], &lse),
    ];
    Ok(Ran { seconds, variant: "-", verdict, computed })
}

/// An LSE of `[heads, tokens]`.
fn by_head<B>(buffer: &B, tokens: usize) -> View<&B> {
    View { buffer, offset: 0, token_stride: 1, head_stride: tokens as u64 }
}

fn run_append(backend: &AnyBackend, case: &AppendCase) -> Result<Ran> {
    let (shape, kv) = (case.spec.shape, case.spec.kv);
    let (kv_c, k_pe) = (upload(backend, &case.kv_c)?, upload(backend, &case.k_pe)?);
    let cache = upload(backend, &case.kv_cache_before)?;
    let spec = MlaDecode { shape, kv, query: case.spec.input, out: Dtype::F32 };
    let layer = KvAppendArgs {
        kv_c: View::dense(&kv_c, 1, shape.kv_lora_rank),
        k_pe: View::dense(&k_pe, 1, shape.qk_rope_head_dim),
        kv: KvView::dense(&cache, &spec),
        k_scale: case.k_scale,
        guard: None,
    };
    let append = backend.compile(case.spec)?;
    let mut step = append.step(0)?;
    append.prepare(&mut step, &case.slot_mapping)?;
    // Another run writes the same bytes again.
    let binding = append.bind(&layer, step.used())?;
    let seconds = time(backend, || append.run(&step, &binding))?;

    let bytes = download(backend, &cache, case.kv_cache.len())?;
    let verdict = check::append(case, &bytes);
    let pool = [kv.num_pages as usize, kv.page_size as usize];
    let computed = vec![if kv.layout.is_plain() {
        Saved::encoded("kv_cache", kv.dtype(), &[pool[0], pool[1], shape.row_elems() as usize], bytes)
    } else {
        Saved::bytes("kv_cache", &[pool[0], pool[1], kv.token(&shape).bytes as usize], bytes)
    }];
    Ok(Ran { seconds, variant: "-", verdict, computed })
}

/// A buffer that holds `bytes`.
pub fn upload(backend: &AnyBackend, bytes: &[u8]) -> Result<Buffer> {
    let buffer = backend.buffer(bytes.len() as u64)?;
    let whole = bytes.len() / 4 * 4;
    backend.upload(&buffer, 0, &bytes[..whole])?;
    let mut rest = bytes[whole..].to_vec();
    if !rest.is_empty() {
        // Transfers are in words.
        rest.resize(4, 0);
        backend.upload(&buffer, whole as u64, &rest)?;
    }
    Ok(buffer)
}

/// A buffer of NaN, so that an element that is not written is found.
pub fn poisoned(backend: &AnyBackend, bytes: usize) -> Result<Buffer> {
    upload(backend, &vec![0xFF; bytes])
}

pub fn download(backend: &AnyBackend, buffer: &Buffer, bytes: usize) -> Result<Vec<u8>> {
    let mut all = backend.download(buffer, bytes.next_multiple_of(4) as u64)?;
    all.truncate(bytes);
    Ok(all)
}

/// Median seconds of up to 9 runs after a warm-up; fewer, but at least 3, where they take long.
pub fn time(backend: &AnyBackend, run: impl Fn() -> Result<()>) -> Result<f64> {
    let run = || run().and_then(|()| wait(backend));
    run()?;
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < 3 || times.len() < 9 && begin.elapsed() < Duration::from_millis(500) {
        let begin = Instant::now();
        run()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}

/// Waits until everything that was submitted is done, and copies nothing.
fn wait(backend: &AnyBackend) -> Result<()> {
    match backend.chosen() {
        #[cfg(feature = "cuda")]
        wgpu_mla::any::Chosen::Cuda(cuda) => cuda.stream().synchronize().map_err(|error| {
            wgpu_mla::Error::Cuda { what: "to wait for the card", detail: error.to_string() }
        }),
        #[cfg(feature = "wgpu")]
        wgpu_mla::any::Chosen::Wgpu(gpu) => {
            let done = gpu.device().poll(wgpu_mla::wgpu::PollType::wait_indefinitely());
            done.map_err(|error| wgpu_mla::Error::DeviceLost { detail: error.to_string() })?;
            gpu.check_lost()
        }
        // The CPU is done when its calls return.
        _ => Ok(()),
    }
}

pub fn decode_shape(case: &DecodeCase) -> String {
    let shape = case.spec.shape;
    let (heads, latent, rope) = (shape.num_heads, shape.kv_lora_rank, shape.qk_rope_head_dim);
    let queries = case.query_start_loc.last().unwrap_or(&0);
    let longest = case.seq_lens.iter().max().unwrap_or(&0);
    let (batch, page) = (case.seq_lens.len(), case.spec.kv.page_size);
    let types = dtypes(case.spec.query, case.spec.kv.dtype());
    format!("b{batch} q{queries} H{heads} {latent}+{rope} ctx {longest} page {page} {types}")
}

/// Cache rows that some query token of each sequence attends, once each.
fn decode_bytes(case: &DecodeCase) -> u64 {
    let row = u64::from(case.spec.shape.row_elems()) * case.spec.kv.dtype().bytes() as u64;
    let queried = case.seq_lens.iter().zip(case.query_start_loc.windows(2)).filter(|(_, q)| q[1] > q[0]);
    queried.map(|(&len, _)| len.max(0) as u64 * row).sum()
}

fn merge_shape(case: &MergeCase) -> String {
    let MergeCase { num_tokens, num_heads, spec, .. } = case;
    format!("tokens {num_tokens} H{num_heads} head_size {} {}", spec.head_size, spec.dtype)
}

fn merge_bytes(case: &MergeCase) -> u64 {
    3 * (case.prefix_output.len() + case.prefix_lse.len() * 4) as u64
}

fn append_shape(case: &AppendCase) -> String {
    let (shape, kv, tokens) = (case.spec.shape, case.spec.kv, case.slot_mapping.len());
    let types = dtypes(case.spec.input, kv.layout);
    let dims = format!("{}+{}", shape.kv_lora_rank, shape.qk_rope_head_dim);
    format!("tokens {tokens} {dims} page {} {types}", kv.page_size)
}

fn append_bytes(case: &AppendCase) -> u64 {
    let written = case.slot_mapping.iter().filter(|&&slot| slot >= 0).count() as u64;
    let (shape, kv) = (case.spec.shape, case.spec.kv);
    written * (u64::from(shape.row_elems()) * case.spec.input.bytes() as u64 + kv.token(&shape).bytes)
}
