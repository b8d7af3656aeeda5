// Outputs that are written by whole words: the row and the element of the output that each element of a word is.
//
// Two 16-bit elements share a word, and with odd sizes they may belong to different rows, where a row is a (token, head). So a thread
// owns a word of the output, not an element, and finds the row of each element in it from its address:
//
//   for word in the span of the output:
//     for element e in it: rest = e - offset
//       outer = rest / outer_stride; inner = rest % outer_stride / inner_stride; d = rest % outer_stride % inner_stride
//
// The division inverts the addressing because the host checked that rows do not overlap. Outer and inner are token and head or head
// and token: outer is the one with the larger stride.
//
// Uses of `params`: output.offset, outer_stride, inner_stride, inner_is_token, num_heads. Constants: HEAD_SIZE, PER_WORD (elements in a
// word), CODE_MASK.

struct Owner {
    is_in: bool, // if `token` is one of the array's, which the caller checks
    token: u32,
    head: u32,
    d: u32,
}

fn owner_of(element: u32) -> Owner {
    if element < params.output.offset {
        return Owner(false, 0u, 0u, 0u);
    }
    let rest = element - params.output.offset;
    let outer = rest / params.outer_stride;
    let in_outer = rest % params.outer_stride;
    let inner = in_outer / params.inner_stride;
    let d = in_outer % params.inner_stride;
    let by_head = params.inner_is_token != 0u;
    let token = select(outer, inner, by_head);
    let head = select(inner, outer, by_head);
    return Owner(d < HEAD_SIZE && head < params.num_heads, token, head, d);
}

fn code_at(word: u32, element: u32) -> u32 {
    return (word >> (16u * (element % PER_WORD))) & CODE_MASK;
}
