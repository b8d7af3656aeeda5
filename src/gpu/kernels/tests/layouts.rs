//! What the shaders read is what the host writes: uniforms and the sections of the tables.

use std::mem::{offset_of, size_of};

use super::*;
use crate::gpu::{LayerUniform, SliceUniform};
use crate::plan::tables::HEADER_WORDS;
use crate::plan::{DIRECT, Merge, QueryToken, WorkItem};

/// Members of a struct of the module: names, offsets, and its size.
fn members(module: &Module, name: &str) -> (Vec<(String, usize)>, usize) {
    let named = module.types.iter().find(|(_, ty)| ty.name.as_deref() == Some(name));
    match &named.unwrap_or_else(|| panic!("no struct {name}")).1.inner {
        TypeInner::Struct { members, span } => {
            let member = |m: &naga::StructMember| (m.name.clone().unwrap_or_default(), m.offset as usize);
            (members.iter().map(member).collect(), *span as usize)
        }
        other => panic!("{name} is {other:?}"),
    }
}

/// The same of a host struct.
macro_rules! host_members {
    ($of:ty: $($field:ident),+) => {
        (vec![$((stringify!($field).to_owned(), offset_of!($of, $field))),+], size_of::<$of>())
    };
}

fn any_decode() -> (Source, Valid) {
    let spec = spec((512, 64), 16, Dtype::F16, Dtype::F16, Dtype::F32);
    let source = decode(&body("shared"), &Caps::WEBGPU, &spec, 1, false).expect("it runs everywhere");
    let valid = valid(&source, PLAIN);
    (source, valid)
}

#[test]
fn uniforms_are_laid_out_as_the_host_writes_them() {
    let (_, valid) = any_decode();
    let (module, _) = &*valid;
    let host = host_members!(
        LayerUniform: logit_scale,
        out_scale,
        lse_scale,
        num_heads,
        q_nope_at,
        q_nope_token_stride,
        q_nope_head_stride,
        q_pe_at,
        q_pe_token_stride,
        q_pe_head_stride,
        kv_at,
        kv_block_stride,
        out_at,
        out_token_stride,
        out_head_stride,
        lse_at,
        lse_token_stride,
        lse_head_stride,
        max_queries,
        has_lengths,
        indices_at,
        indices_stride,
        lengths_at,
        lengths_stride,
        first_slot,
        num_slots,
        reserved_0,
        reserved_1
    );
    assert_eq!(members(module, "Layer"), host);
    let host = host_members!(
        SliceUniform: first_item,
        end_item,
        num_merges,
        page_size,
        num_pages,
        items_at,
        queries_at,
        merges_at,
        merge_partials_at,
        reserved_0,
        reserved_1,
        reserved_2
    );
    assert_eq!(members(module, "Slice"), host);
}

#[test]
fn constants_are_those_of_the_host() {
    let (_, valid) = any_decode();
    let (module, _) = &*valid;
    assert_eq!(constant(module, "DIRECT"), DIRECT);
    assert!(HEADER_WORDS.is_multiple_of(4), "items follow the header");
}

/// Sections of the tables are words to the shaders, which read them as `FIELD = tables[PLACE + WORD]`.
#[test]
fn shaders_read_the_fields_of_the_tables_in_the_hosts_order() {
    let spec = spec((512, 64), 16, Dtype::F16, Dtype::F16, Dtype::F32);
    let merge = Merging::ManyRows.source(&spec, Features::NONE, false);
    let reads = |source: &Source, place: &str, stride: &str, size: usize, fields: &[(&str, usize)]| {
        let stride = format!("{stride} * {}u;", size / 4);
        assert!(source.text.contains(&stride), "{} lacks {stride:?}", source.label);
        for &(expected, offset) in fields {
            let word = if offset == 0 { String::new() } else { format!(" + {}u", offset / 4) };
            let read = expected.replace("{}", &format!("tables[{place}{word}]"));
            assert!(source.text.contains(&read), "{} lacks {read:?}", source.label);
        }
    };
    for variant in Body::ALL {
        let decode = decode(&variant, &devices()[3], &spec, 1, false).expect("it runs");
        reads(
            &decode,
            "at",
            "let at = slice.items_at + number",
            size_of::<WorkItem>(),
            &[
                ("item.first_row = {};", offset_of!(WorkItem, first_row)),
                ("item.num_rows = {};", offset_of!(WorkItem, num_rows)),
                ("item.page_begin = {};", offset_of!(WorkItem, page_begin)),
                ("item.kv_begin = {};", offset_of!(WorkItem, kv_begin)),
                ("item.kv_end = {};", offset_of!(WorkItem, kv_end)),
                ("item.partial = {};", offset_of!(WorkItem, partial)),
            ],
        );
        reads(
            &decode,
            "at",
            "let at = slice.queries_at + (index / layer.num_heads)",
            size_of::<QueryToken>(),
            &[
                ("return Query(bound_token({}), ", offset_of!(QueryToken, token)),
                (", {});", offset_of!(QueryToken, visible)),
            ],
        );
    }
    reads(
        &merge,
        "merge_at",
        "let merge_at = slice.merges_at + merge",
        size_of::<Merge>(),
        &[
            ("let token = bound_token({});", offset_of!(Merge, token)),
            ("let begin = slice.merge_partials_at + {};", offset_of!(Merge, begin)),
            ("let end = slice.merge_partials_at + {};", offset_of!(Merge, end)),
        ],
    );
}
