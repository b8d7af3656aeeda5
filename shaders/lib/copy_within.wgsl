// kv_copy_pages inside of one buffer, which cannot be bound twice.

fn load_unit(at: u32) -> Unit {
    return kv[at];
}
