//! A CUDA driver without a card: `libcuda.so` with the functions that this crate's CUDA backend calls, whose kernels run in the PTX
//! interpreter of `scripts/ptxemu`. With it the tests of the backend run where there is no NVIDIA card: `scripts/ptx.sh suite`.
//!
//! Work on a stream is done before the call returns, one call at a time in a process. Wrong use is refused where the driver would refuse
//! it: a context that is not current on the thread, a launch with other shared memory or threads than a kernel allows, an allocation
//! during a capture. What a kernel does wrong (an access outside of a buffer, a race, a barrier that is never reached) is an error of its
//! launch, with the interpreter's sentence.
//!
//! `emulated_refuse_memory`, which is no function of the driver, has a later allocation of the calling thread refused.
//!
//! | variable | what |
//! |---|---|
//! | `MLA_EMULATED_CAPABILITY` | the card's compute capability: 80, 86, 89, 90 (the default), 100, 103 or 120 |
//! | `MLA_EMULATED_CARDS` | the number of cards, 1 by default |
//! | `MLA_EMULATED_TIMES` | a file to which the seconds of each kernel that was launched are added at the end |
//! | `MLA_EMULATED_ORDERS` | `both`: each launch runs with its warps first to last and last to first, and both must give the same bits |

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(clippy::missing_safety_doc, reason = "NVIDIA's documentation of the driver has it")]

mod card;
mod graphs;
mod interpreter;
mod kernels;
mod memory;
mod state;
mod streams;
mod tensor_map;
