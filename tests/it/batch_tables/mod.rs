//! Tables made on the device, for batches whose lengths the host does not know, padded to a fixed size. The same checks on every
//! backend: commands that are recorded once, as a pass or a graph, serve batch after batch.

mod on_cpu;
#[cfg(feature = "cuda")]
mod on_cuda;
#[cfg(feature = "wgpu")]
mod on_wgpu;
mod serving;

/// The checks of [`serving`] as tests of one backend; `$backend` gives one, or why there is none here.
macro_rules! serving_tests {
    (@of $backend:expr; $($name:ident)*) => {
        $(fn $name() -> mla_support::Outcome {
            super::serving::$name(&$backend()?);
            Ok(())
        })*
        $crate::tests![$($name),*];
    };
    ($backend:expr) => {
        super::serving_tests!(@of $backend;
            a_step_of_upper_bounds_decodes_the_true_lengths
            ranks_of_a_batch_decode_their_shares
            wild_batches_stay_in_the_pool
            host_tables_after_device_tables
            every_refusal_of_device_tables
        );
    };
}
use serving_tests;

crate::tests![(in on_cpu, #[cfg(feature = "cuda")] on_cuda, #[cfg(feature = "wgpu")] on_wgpu)];
