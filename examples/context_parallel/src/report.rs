//! What is printed.

use wgpu_mla::CombineForm;

use crate::Result;
use crate::problems::Work;
use crate::rank::Did;

/// A form's name on the command line.
#[must_use]
pub fn name(form: CombineForm) -> &'static str {
    match form {
        CombineForm::AllToAll => "a2a",
        CombineForm::AllGatherReduceScatter => "ag_rs",
        CombineForm::AllGather => "ag",
    }
}

/// Prints what the ranks did; true if all of it was right.
pub fn print(work: &Work, forms: impl Fn(u32) -> Vec<CombineForm>, ranks: &[Result<Vec<Did>>]) -> bool {
    let runs = work.names().flat_map(|(name, heads)| forms(heads).into_iter().map(move |form| (name, form)));
    let (mut right, mut count) = (true, 0);
    for (run, (what, form)) in runs.enumerate() {
        let dids: Vec<&Did> = ranks.iter().filter_map(|rank| rank.as_ref().ok()?.get(run)).collect();
        if dids.is_empty() {
            continue;
        }
        println!("{what} ({})", name(form));
        for did in dids {
            line(did);
            right &= did.failure.is_none();
            count += 1;
        }
    }
    for error in ranks.iter().filter_map(|rank| rank.as_ref().err()) {
        println!("error: {error}");
        right = false;
    }
    if count == 0 && right {
        println!("error: nothing was run: the heads are no multiple of the ranks, --form ag serves them");
        right = false;
    }
    let verdict = if right { "PASS" } else { "FAIL" };
    println!("{} cases and batches, {count} results of ranks: {verdict}", work.names().count());
    right
}

fn line(did: &Did) {
    let Did { rank, device, variant, tokens, read, sent, computed, waited, error, failure, .. } = did;
    let (ms, kb) = (1e3, 1024.0);
    println!(
        "  rank {rank}  {tokens:>7} tokens, {:>9.1} KiB read, {:>8.1} KiB sent; computed {:>8.3} ms, waited {:>8.3} ms; \
         error {:>4.1} % of the allowed  {} on {device}, {variant}",
        *read as f64 / kb,
        *sent as f64 / kb,
        computed.as_secs_f64() * ms,
        waited.as_secs_f64() * ms,
        error * 100.0,
        if failure.is_none() { "ok" } else { "WRONG" },
    );
    if let Some(failure) = failure {
        println!("    {failure}");
    }
}
