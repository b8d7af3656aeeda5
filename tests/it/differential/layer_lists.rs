//! Lists of slots for a step of a layer whose longer sequences attend no more than these.

use wgpu_mla::{LayerArrays, PagePool};

use super::draw::Draw;
use super::place::poisoned;
use super::text;

/// The list of each query token of a step.
pub struct Lists {
    /// The positions that each query token attends; `None` for one whose sequence is no longer than a list.
    pub positions: Vec<Option<Vec<usize>>>,
    /// `[tokens, topk]`, as a layer reads them; anything for tokens without a list.
    bytes: Vec<u8>,
}

impl Lists {
    /// Lists of what each token sees, in any order, between entries that are no slots.
    pub fn draw(draw: &mut Draw, pool: &PagePool, arrays: &LayerArrays, topk: u32) -> Result<Self, String> {
        let (mut positions, mut all) = (Vec::new(), Vec::new());
        let (page_size, num_slots) = (pool.spec().page_size as usize, pool.spec().num_slots() as i32);
        for (seq, tokens) in arrays.tokens() {
            let pages = pool.pages(*seq).map_err(text)?;
            let slot = |at: usize| (pages[at / page_size] as usize * page_size + at % page_size) as i32;
            for position in tokens.clone() {
                let seen = position as usize + 1;
                if topk == 0 || tokens.end <= topk {
                    positions.push(None);
                    all.extend(poisoned(draw, topk as usize * 4));
                    continue;
                }
                let mut listed = draw.shuffled(seen);
                listed.truncate(draw.within(1, seen.min(topk as usize)));
                let mut list = vec![0; topk as usize];
                list.fill_with(|| draw.pick(&[-1, i32::MIN, num_slots, i32::MAX]));
                let places = draw.shuffled(topk as usize);
                places.into_iter().zip(&listed).for_each(|(place, &at)| list[place] = slot(at));
                all.extend(list.into_iter().flat_map(i32::to_le_bytes));
                positions.push(Some(listed));
            }
        }
        Ok(Self { positions, bytes: all })
    }

    /// The lists, and memory for those of as many tokens as a step may have.
    pub fn bytes(&self, draw: &mut Draw, most: usize, topk: u32) -> Vec<u8> {
        [&self.bytes[..], &poisoned(draw, most * topk as usize * 4 - self.bytes.len())].concat()
    }

    /// The keys that a query token attends of those that it sees, but for the last of them if `drops_key`.
    pub fn of<'a, T>(&self, token: usize, seen: &'a [T], drops_key: bool) -> Vec<&'a T> {
        let mut all: Vec<&T> = match &self.positions[token] {
            Some(positions) => positions.iter().map(|&at| &seen[at]).collect(),
            None => seen.iter().collect(),
        };
        all.truncate(all.len().saturating_sub(usize::from(drops_key)));
        all
    }
}
