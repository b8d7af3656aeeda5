// Where the tokens of an item are in the cache. Loaders know of pages by this file alone, but for TMA boxes, which need whole ones.
#pragma once

#include "mla.cuh"

DEVICE u32 page_id(const Args& args, const WorkItem& item, u32 page) {
    return bound_page(args, args.pages[item.page_begin + page]);
}

// Offset in the cache, in elements, of an item's token.
template <int DIM>
DEVICE u64 row_of_token(const Args& args, const WorkItem& item, u32 token) {
    const u32 page = token / args.page_size;
    return page_id(args, item, page) * args.kv_block_stride + static_cast<u64>(token - page * args.page_size) * DIM;
}

// For loaders that go through a range: the place of an item's token, as an index of the page list and an offset in that page.
DEVICE void find_token(const Args& args, const WorkItem& item, u32 token, u32& page, u32& offset) {
    page = token / args.page_size;
    offset = token - page * args.page_size;
    page += item.page_begin;
}

// The place a tile's tokens on.
DEVICE void advance_by_tile(const Args& args, u32& page, u32& offset) {
    page += args.tile_pages;
    offset += args.tile_rest;
    if (offset >= args.page_size) {
        offset -= args.page_size;
        page++;
    }
}
