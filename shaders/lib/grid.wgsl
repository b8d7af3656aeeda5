// Every small op is a list of items over a grid that is folded in two, since a dimension holds 65,535 workgroups.
// Prelude: GROUP, invocations in a workgroup.
fn item_of(group: vec3<u32>, groups: vec3<u32>, lane: u32) -> u32 {
    return (group.y * groups.x + group.x) * GROUP + lane;
}
