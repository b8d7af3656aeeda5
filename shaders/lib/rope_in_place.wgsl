// Rows to rotate are in the buffer of rotated ones, which then has one binding. An invocation reads a unit before it writes it.
fn x_quad(at: u32) -> QueryQuad {
    return y[at];
}
