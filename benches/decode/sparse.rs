//! Decodes of listed slots, and dense decodes of records beside them: a table of their own.

mod problem;
mod workload;

use std::collections::HashMap;

use serde_json::json;
use wgpu_mla::{Error, KvLayout};

use crate::support::Result;
use crate::support::args::Args;
use crate::support::device::Timed;
use crate::support::record::{Records, figure, micros, timing_fields};
use problem::Problem;
use workload::{Attends, Workload, full, small, tiny};

/// The workloads of a run.
pub fn workloads(device: &impl Timed, args: &Args) -> Vec<Workload> {
    let all = match () {
        () if args.test => tiny(),
        () if args.full || !device.is_small() => full(),
        () => small(),
    };
    all.into_iter().filter(|workload| args.wants(&workload.name())).collect()
}

/// Checks and times each.
///
/// # Errors
/// On a lost device.
pub fn run<D: Timed>(
    device: &D,
    workloads: &[Workload],
    args: &Args,
    ceiling: f64,
    records: &mut Records,
) -> Result<()> {
    if workloads.is_empty() {
        return Ok(());
    }
    println!(
        "\n# Sparse decode on {}\n\nus: device time of decode + merge. KV GB/s: tokens that are attended, each as often as it is listed. \
         Ratio: of other scales to powers of two; of lists to as many tokens of a sequence.\n",
        device.name()
    );
    println!(
        "| workload | variant | us | min | KV GB/s | ceiling | TFLOP/s | ratio | items | error (of allowed) |"
    );
    println!("|---|---|{}", "---|".repeat(8));
    let mut done = HashMap::new();
    for workload in workloads {
        if let Err(error) = time(device, workload, args, ceiling, &mut done, records) {
            // On a lost device everything that follows fails: this says so.
            device.buffer(4)?;
            records.fail(&workload.name(), error.as_ref());
        }
    }
    Ok(())
}

fn time<D: Timed>(
    device: &D,
    w: &Workload,
    args: &Args,
    ceiling: f64,
    done: &mut HashMap<String, f64>,
    records: &mut Records,
) -> Result<()> {
    let skip = |why: &str| {
        println!("| {} | skipped: {why} |", w.name());
        Ok(())
    };
    if w.spec().cache_bytes() > device.largest_binding() {
        return skip("its cache does not fit one binding of this device");
    }
    let problem = match Problem::new(device, w, args.variant.as_deref(), args.items) {
        Ok(problem) => problem,
        Err(error) => {
            return match error.downcast_ref::<Error>() {
                Some(error) if is_not_served(error) => skip(&error.to_string()),
                _ => Err(error),
            };
        }
    };
    let variant = problem.layers.op.variant();
    let right = problem.check(device).map_err(|error| format!("{variant}: {error}"))?;
    let timing = device.time(args.replays(), |recorder, call| problem.layers.record(recorder, call))?;
    let seconds = timing.median;
    done.insert(w.name(), seconds);
    let ratio = w.base().and_then(|base| done.get(&base.name())).map_or(f64::NAN, |base| seconds / base);
    let (rate, tflop) = (w.kv_bytes() / seconds / 1e9, w.flop() / seconds / 1e12);
    let items = problem.plan.items.len();
    print!("| {} | {variant} | {} | {} ", w.name(), micros(seconds * 1e6), micros(timing.min * 1e6));
    print!("| {} | {} % | {} ", figure(rate), figure(rate / ceiling * 100.0), figure(tflop));
    println!("| {} | {items} | {right} |", figure(ratio));
    let mut record = json!({
        "workload": w.name(), "variant": variant, "heads": w.heads, "sequences": w.sequences, "q_len": w.q_len,
        "topk": if let Attends::Listed(topk) = w.attends { topk } else { 0 },
        "kv": w.layout.name(), "gb_s": rate, "tflop_s": tflop, "ratio": ratio, "items": items, "error": right,
    });
    if let Some(fields) = record.as_object_mut() {
        fields.extend(timing_fields(&timing));
    }
    records.add(record);
    Ok(())
}

/// Whether a backend says that it has no kernel for lists or records.
fn is_not_served(error: &Error) -> bool {
    match error {
        Error::LayoutUnsupported { .. } => true,
        Error::NoVariant { why } | Error::VariantUnavailable { why, .. } => why.contains("it does not serve"),
        _ => false,
    }
}

/// Bytes of a token.
fn token_bytes(layout: KvLayout, (latent, rope): (u32, u32)) -> u64 {
    layout.token(latent, rope).bytes
}
