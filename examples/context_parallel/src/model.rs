//! The cost model of docs/scale.md.

/// Prints it.
pub fn print() {
    println!("not yet");
}
