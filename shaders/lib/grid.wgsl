// The index of a thread in a grid of two dimensions, one after the other: WebGPU allows 65,535 workgroups in a dimension.
// Constants: GROUP, threads of a workgroup.
fn item_of(group: vec3<u32>, groups: vec3<u32>, lane: u32) -> u32 {
    return (group.y * groups.x + group.x) * GROUP + lane;
}
