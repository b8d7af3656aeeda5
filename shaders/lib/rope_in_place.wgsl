// x_quad of rotations in place: x is the buffer of y, which has one binding. A thread reads a unit before it writes it.
fn x_quad(at: u32) -> QueryQuad {
    return y[at];
}
