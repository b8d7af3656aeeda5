// Where the tokens of an item are in the cache. Loaders know of pages and of lists of slots by this file alone, but for TMA boxes, which
// need whole pages.
#pragma once

#include "mla.cuh"

DEVICE u32 page_id(const Args& args, const WorkItem& item, u32 page) {
    return bound_page(args, args.pages[item.page_begin + page]);
}

// Where tokens are listed: finds the item's list, which begins at `page_begin`, and cuts the item where the list ends. All rows of an item
// are of one query token. The kernel before may have written lists, so this is for after griddep_wait.
DEVICE void find_list(const Args& args, WorkItem& item) {
    if (!args.is_listed) return;
    const u32 token = bound_token(args, args.queries[item.first_row / args.num_heads].token);
    item.page_begin = token * args.list_stride;
    if (args.topk_lengths != nullptr) {
        const int length = static_cast<int>(args.topk_lengths[token * args.topk_length_stride]);
        item.kv_end = max(item.kv_begin, min(item.kv_end, static_cast<u32>(max(length, 0))));
    }
}

// The block's item, as find_list leaves it.
DEVICE WorkItem item_of_block(const Args& args) {
    WorkItem item = args.items[blockIdx.x];
    find_list(args, item);
    return item;
}

// Whether an entry of a list is a slot of this cache: it is skipped if it is not. A negative entry is a large number.
DEVICE bool is_slot(const Args& args, u32 entry) {
    return entry - args.first_slot < args.num_slots;
}

// The page of a slot of this cache, and its offset there.
DEVICE u32 page_of_slot(const Args& args, u32 entry, u32& offset) {
    const u32 slot = entry - args.first_slot, page = divide(slot, args.by_page_size);
    offset = slot - page * args.page_size;
    return page;
}

// What row_of_token gives for an entry that is no slot.
constexpr u64 NOWHERE = ~0ull;

// Offset in the cache, in elements, of an item's token.
template <int DIM>
DEVICE u64 row_of_token(const Args& args, const WorkItem& item, u32 token) {
    u32 id, offset;
    if (args.is_listed) {
        const u32 entry = args.pages[item.page_begin + token];
        if (!is_slot(args, entry)) return NOWHERE;
        id = page_of_slot(args, entry, offset);
    } else {
        const u32 page = token / args.page_size;
        id = page_id(args, item, page);
        offset = token - page * args.page_size;
    }
    return id * args.kv_block_stride + static_cast<u64>(offset) * DIM;
}

// For loaders that go through a range: the place of an item's token, as an index of the page list and an offset in that page, or as an
// index of the lists.
DEVICE void find_token(const Args& args, const WorkItem& item, u32 token, u32& page, u32& offset) {
    page = token;
    offset = 0;
    if (!args.is_listed) {
        page = token / args.page_size;
        offset = token - page * args.page_size;
    }
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
