//! The cost model of docs/scale.md: what a layer's decode takes on so many ranks.
//!
//! ```text
//! decode    = start + ceil(tokens / ranks) * time of a token, times the ranks that share a core
//! exchange  = latency + (ranks - 1) * time of a further rank + bytes sent / rate, once or twice by form
//! combine   = launch + (bytes read + bytes written) / rate
//! ```

mod figures;

use wgpu_mla::{CombineForm, ContextParallelSpec, Dtype, LseBase};

use crate::report::name;
use figures::{
    CARD_BYTES, H200, H200_OF_TWO, IN_PROCESS, LAYERS, LINKS, Link, MEASURED, MEASURED_CARD_EXCHANGES,
    MEASURED_CARDS, MEASURED_EXCHANGES, MEASURED_TOKENS, Machine, NVLINK, TWO_CORES,
};

const FORMS: [CombineForm; 3] =
    [CombineForm::AllToAll, CombineForm::AllGatherReduceScatter, CombineForm::AllGather];

/// A decode, and who does it.
#[derive(Debug, Clone, Copy)]
struct Case {
    machine: Machine,
    link: Link,
    sequences: u32,
    /// Tokens of all sequences together.
    tokens: f64,
    heads: u32,
    cache: Dtype,
    out: Dtype,
}

/// What a rank does in a layer.
#[derive(Debug, Clone, Copy)]
struct Cost {
    ranks: u32,
    form: CombineForm,
    us: f64,
    /// Bytes of the cache.
    read: f64,
    sent: f64,
    launches: u32,
}

impl Case {
    /// One form on so many ranks; nothing where the ranks cannot share the heads out in it.
    fn cost(&self, ranks: u32, form: CombineForm) -> Option<Cost> {
        let Self { machine, heads, cache, .. } = *self;
        let shared = if machine.cores == 0 { 1.0 } else { f64::from(ranks.div_ceil(machine.cores)).max(1.0) };
        // One rank on a machine of cores has all of them.
        let threads = if ranks == 1 { f64::from(machine.cores.max(1)) } else { 1.0 };
        let tokens = (self.tokens / f64::from(ranks)).ceil();
        let token_ns = machine.token_ns[Machine::column(heads, cache)];
        let start = machine.start_us[usize::from(heads > 16)];
        let decode = start + tokens * token_ns / 1e3 * self.fair(ranks, shared) / threads;
        let read = tokens * 576.0 * cache.bytes() as f64;
        if ranks == 1 {
            return Some(Cost { ranks, form, us: decode, read, sent: 0.0, launches: 2 });
        }
        let (exchange, sent) = self.exchange(ranks, form)?;
        let launches = 2 + if form == CombineForm::AllGatherReduceScatter { 3 } else { 2 };
        Some(Cost { ranks, form, us: decode + exchange, read, sent, launches })
    }

    /// How much longer a rank takes beside the others on its core.
    fn fair(&self, ranks: u32, shared: f64) -> f64 {
        let cores = f64::from(self.machine.cores);
        if cores == 0.0 { shared } else { (f64::from(ranks) / cores).max(1.0) }
    }

    /// Micro-seconds of exchange and combine, and bytes that a rank sends.
    fn exchange(&self, ranks: u32, form: CombineForm) -> Option<(f64, f64)> {
        let Self { machine, link, heads, out, .. } = *self;
        if form != CombineForm::AllGather && !heads.is_multiple_of(ranks) {
            return None;
        }
        let spec = ContextParallelSpec {
            num_heads: heads,
            kv_lora_rank: 512,
            out,
            lse_base: LseBase::E,
            rank: 0,
            world: ranks,
            max_tokens: self.sequences,
            form,
        };
        let sent = spec.bytes_sent() as f64;
        let partial = f64::from(self.sequences) * f64::from(heads) * 512.0 * out.bytes() as f64;
        let (exchanges, touched) = match form {
            CombineForm::AllToAll => (1.0, partial + partial / f64::from(ranks)),
            CombineForm::AllGatherReduceScatter => (2.0, 2.0 * partial),
            CombineForm::AllGather => (1.0, (f64::from(ranks) + 1.0) * partial),
        };
        let combine = machine.launch_us + touched / machine.combine_gbs / 1e3;
        let latency = exchanges * (link.latency_us + f64::from(ranks - 1) * link.rank_us);
        let fair = self.fair(ranks, 1.0);
        Some((latency + (sent / link.gbs / 1e3 + combine) * fair, sent))
    }

    fn best(&self, ranks: u32) -> Option<Cost> {
        let all = FORMS.into_iter().filter_map(|form| self.cost(ranks, form));
        all.min_by(|a, b| a.us.total_cmp(&b.us))
    }

    /// The most ranks, doubled, of which each doubling takes a tenth off the time or more.
    fn pays(&self) -> Option<Cost> {
        let mut cost = self.best(1)?;
        while let Some(next) = self.best(cost.ranks * 2).filter(|next| next.ranks <= self.link.ranks) {
            if next.us > 0.9 * cost.us {
                break;
            }
            cost = next;
        }
        Some(cost)
    }
}

/// Prints the model, as docs/scale.md has it.
pub fn print() {
    println!(
        "{}; L 512, R 64, outputs in bf16, one layer. Links and launches are assumptions: see model/figures.rs.",
        H200.name
    );
    long();
    batches();
    forms();
    check_cards();
    check();
}

fn case(link: Link, sequences: u32, tokens: f64, heads: u32, cache: Dtype) -> Case {
    Case { machine: H200, link, sequences, tokens, heads, cache, out: Dtype::Bf16 }
}

fn bytes(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{:.2} GB", v / 1e9),
        v if v >= 1e6 => format!("{:.2} MB", v / 1e6),
        v => format!("{:.1} kB", v / 1e3),
    }
}

fn long() {
    println!(
        "\n## One sequence: up to how many ranks a doubling takes 10 % off the time\n\n\
         Ranks that hold it: the fewest cards of 100 GB for the caches of 61 layers.\n\n\
         | link | tokens | heads | cache | ranks that hold it | 1 rank us | ranks that pay | us | faster | form | read by a rank | sent | launches |\n\
         |---|---|---|---|---|---|---|---|---|---|---|---|---|"
    );
    for link in LINKS {
        for (tokens, heads, cache) in cases() {
            let case = case(link, 1, tokens, heads, cache);
            let (Some(one), Some(best)) = (case.best(1), case.pays()) else { continue };
            let hold = (tokens * 576.0 * cache.bytes() as f64 * LAYERS / CARD_BYTES).ceil();
            let form = if best.ranks == 1 { "-" } else { name(best.form) };
            println!(
                "| {} | {} M | {heads} | {cache} | {hold} | {:.0} | {} | {:.0} | {:.1} | {form} | {} | {} | {} |",
                link.name,
                tokens / 1e6,
                one.us,
                best.ranks,
                best.us,
                one.us / best.us,
                bytes(best.read),
                bytes(best.sent),
                best.launches,
            );
        }
    }
}

fn cases() -> impl Iterator<Item = (f64, u32, Dtype)> {
    let contexts = [0.1e6, 1e6, 10e6, 100e6].into_iter();
    contexts.flat_map(|tokens| {
        let heads = [16, 128].into_iter();
        heads.flat_map(move |heads| [Dtype::Bf16, Dtype::E4m3].map(|cache| (tokens, heads, cache)))
    })
}

fn batches() {
    println!(
        "\n## Two and eight ranks over one\n\n\
         | link | batch | heads | cache | 1 rank us | 2 ranks us | faster | 8 ranks us | faster |\n|---|---|---|---|---|---|---|---|---|"
    );
    for link in LINKS {
        for (sequences, len) in [(1, 131_072.0), (1, 1_048_576.0), (64, 8192.0), (64, 131_072.0)] {
            for heads in [16, 128] {
                let cache = Dtype::Bf16;
                let case = case(link, sequences, f64::from(sequences) * len, heads, cache);
                let us: Vec<f64> =
                    [1, 2, 8].into_iter().filter_map(|ranks| Some(case.best(ranks)?.us)).collect();
                let [one, two, eight] = us[..] else { continue };
                println!(
                    "| {} | {sequences} x {len} | {heads} | {cache} | {one:.0} | {two:.0} | {:.2} | {eight:.0} | {:.2} |",
                    link.name,
                    one / two,
                    one / eight,
                );
            }
        }
    }
}

fn forms() {
    println!(
        "\n## Which exchange, 128 heads: micro-seconds of exchange and combine\n\n\
         | link | ranks | sequences | a2a | ag_rs | ag |\n|---|---|---|---|---|---|"
    );
    for link in LINKS {
        for ranks in [2, 4, 8, 64, 128].into_iter().filter(|&ranks| ranks <= link.ranks) {
            for sequences in [1, 64, 512] {
                let case = case(link, sequences, 0.0, 128, Dtype::Bf16);
                let us: Vec<String> = FORMS
                    .into_iter()
                    .map(|form| case.exchange(ranks, form).map_or("-".into(), |(us, _)| format!("{us:.0}")))
                    .collect();
                println!("| {} | {ranks} | {sequences} | {} |", link.name, us.join(" | "));
            }
        }
    }
}

/// The model against two cards.
fn check_cards() {
    println!(
        "\n## Against measurement: two of {}, joined by {}, NCCL\n\n\
         | what | ranks | model us | measured us | model over measured |\n|---|---|---|---|---|",
        H200_OF_TWO.name, NVLINK.name
    );
    let mut ratios = Vec::new();
    let mut line = |what: String, ranks: u32, model: f64, measured: f64| {
        ratios.push(model / measured);
        println!("| {what} | {ranks} | {model:.1} | {measured:.1} | {:.2} |", model / measured);
    };
    let of = |sequences: u32, tokens: f64, heads: u32, cache: Dtype, out: Dtype| Case {
        machine: H200_OF_TWO,
        out,
        ..case(NVLINK, sequences, tokens, heads, cache)
    };
    for run in MEASURED_CARDS {
        let case = of(1, 1_048_576.0, run.heads, run.cache, Dtype::F32);
        if let Some(cost) = case.best(run.ranks) {
            line(format!("1 x 1048576, {} heads, {}", run.heads, run.cache), run.ranks, cost.us, run.us);
        }
    }
    for (sequences, out, measured) in MEASURED_CARD_EXCHANGES {
        for (form, measured) in FORMS.into_iter().zip(measured) {
            if let Some((us, _)) = of(sequences, 0.0, 128, Dtype::Bf16, out).exchange(2, form) {
                line(format!("exchange of {sequences} x 128 x 512 {out}, {}", name(form)), 2, us, measured);
            }
        }
    }
    said(ratios);
}

fn said(mut ratios: Vec<f64>) {
    ratios.sort_by(f64::total_cmp);
    let (first, last) = (ratios.first().copied().unwrap_or(1.0), ratios.last().copied().unwrap_or(1.0));
    println!("\nModel over measured: {first:.2} to {last:.2}, median {:.2}.", ratios[ratios.len() / 2]);
}

/// The model against what was measured here.
fn check() {
    println!(
        "\n## Against measurement: {}, joined by {}\n\n\
         | what | ranks | model us | measured us | model over measured |\n|---|---|---|---|---|",
        TWO_CORES.name, IN_PROCESS.name
    );
    let mut ratios = Vec::new();
    let mut line = |what: String, ranks: u32, model: f64, measured: f64| {
        ratios.push(model / measured);
        println!("| {what} | {ranks} | {model:.0} | {measured:.0} | {:.2} |", model / measured);
    };
    let of = |sequences: u32, tokens: f64, heads: u32, cache: Dtype| Case {
        machine: TWO_CORES,
        out: Dtype::F32,
        ..case(IN_PROCESS, sequences, tokens, heads, cache)
    };
    for run in MEASURED {
        let case = of(1, MEASURED_TOKENS.into(), run.heads, run.cache);
        let Some(cost) = case.best(run.ranks) else { continue };
        line(
            format!("1 x {MEASURED_TOKENS}, {} heads, {}", run.heads, run.cache),
            run.ranks,
            cost.us,
            run.us,
        );
    }
    for (ranks, measured) in MEASURED_EXCHANGES {
        for (form, measured) in FORMS.into_iter().zip(measured) {
            let model = of(8, 0.0, 128, Dtype::Bf16).exchange(ranks, form);
            if let (Some((us, _)), Some(measured)) = (model, measured) {
                line(format!("exchange of 8 x 128 x 512, {}", name(form)), ranks, us, measured);
            }
        }
    }
    said(ratios);
}
