//! `tokenizer.model` of SentencePiece, as far as a tokenizer needs it: its pieces, and how a text is normalised. The format is protobuf.

use std::collections::BTreeMap;

use serde_json::{Value, json};

/// Field numbers of `ModelProto`, `SentencePiece`, `TrainerSpec` and `NormalizerSpec`.
mod fields {
    pub const PIECES: u64 = 1;
    pub const TRAINER: u64 = 2;
    pub const NORMALIZER: u64 = 3;
    pub const PIECE: u64 = 1;
    pub const SCORE: u64 = 2;
    pub const KIND: u64 = 3;
    pub const MODEL_TYPE: u64 = 3;
    pub const SUFFIX: u64 = 24;
    pub const BYTE_FALLBACK: u64 = 35;
    pub const CHARSMAP: u64 = 2;
    pub const DUMMY_PREFIX: u64 = 3;
    pub const EXTRA_SPACES: u64 = 4;
    pub const ESCAPE: u64 = 5;
}

/// Kinds of pieces.
pub const NORMAL: u64 = 1;
pub const UNKNOWN: u64 = 2;
pub const CONTROL: u64 = 3;
pub const USER_DEFINED: u64 = 4;
#[cfg(not(target_arch = "wasm32"))]
pub const BYTE: u64 = 6;

const UNIGRAM: u64 = 1;
const BPE: u64 = 2;

/// What stands for a space.
const SPACE: &str = "\u{2581}";

pub struct Piece<'a> {
    pub text: &'a str,
    pub score: f32,
    pub kind: u64,
}

/// The tokenizer in the form of tokenizer.json.
///
/// # Errors
/// A malformed file; a model that is not served.
pub fn read(file: &[u8]) -> Result<Value, String> {
    let (mut pieces, mut trainer, mut normalizer) = (Vec::new(), Trainer::default(), Normalizer::default());
    for field in Fields(file) {
        match field? {
            (fields::PIECES, Field::Bytes(of)) => pieces.push(piece(of)?),
            (fields::TRAINER, Field::Bytes(of)) => trainer = Trainer::read(of)?,
            (fields::NORMALIZER, Field::Bytes(of)) => normalizer = Normalizer::read(of)?,
            _ => (),
        }
    }
    if pieces.iter().all(|piece| piece.kind != UNKNOWN) {
        return Err(NO_UNKNOWN.into());
    }
    if normalizer.has_map || normalizer.removes_spaces {
        return Err("a model whose texts are normalised is not served; download a tokenizer.json".into());
    }
    if trainer.is_suffix || !normalizer.escapes {
        return Err("a model whose spaces are at the ends of words, or not escaped, is not served; download a tokenizer.json".into());
    }
    let Trainer { model, byte_fallback, .. } = trainer;
    made(&pieces, model, byte_fallback, normalizer.dummy_prefix)
}

const NO_UNKNOWN: &str = "it has no piece for what is unknown";

/// The same from the pieces of a model of BPE, as GGUF files have them. With a `dummy_prefix` there is one more space before a text, also
/// where it begins with spaces, and behind each special token. llama.cpp does so too; transformers 5 adds none to a space that is there.
///
/// # Errors
/// Pieces none of which is for what is unknown.
#[cfg(not(target_arch = "wasm32"))]
pub fn of_pieces(pieces: &[Piece<'_>], dummy_prefix: bool) -> Result<Value, String> {
    let mut made = made(pieces, BPE, pieces.iter().any(|piece| piece.kind == BYTE), dummy_prefix)?;
    if dummy_prefix {
        let (prepend, replace) = (
            json!({"type": "Prepend", "prepend": SPACE}),
            json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE}),
        );
        made["normalizer"] = json!({"type": "Sequence", "normalizers": [prepend, replace]});
        made["pre_tokenizer"] = Value::Null;
    }
    Ok(made)
}

fn made(pieces: &[Piece<'_>], model: u64, byte_fallback: bool, dummy_prefix: bool) -> Result<Value, String> {
    let unknown = pieces.iter().position(|piece| piece.kind == UNKNOWN).ok_or(NO_UNKNOWN)?;
    let model = match model {
        BPE => {
            let vocab: BTreeMap<&str, usize> =
                pieces.iter().enumerate().map(|(id, piece)| (piece.text, id)).collect();
            json!({"type": "BPE", "vocab": vocab, "merges": merges(pieces), "unk_token": pieces[unknown].text, "fuse_unk": true,
                "byte_fallback": byte_fallback})
        }
        UNIGRAM => {
            let vocab: Vec<(&str, f32)> = pieces.iter().map(|piece| (piece.text, piece.score)).collect();
            json!({"type": "Unigram", "vocab": vocab, "unk_id": unknown, "byte_fallback": byte_fallback})
        }
        other => return Err(format!("model_type {other}: must be {UNIGRAM}, unigram, or {BPE}, BPE")),
    };
    let added = |(id, piece): (usize, &Piece<'_>)| {
        let is_added = matches!(piece.kind, UNKNOWN | CONTROL | USER_DEFINED);
        is_added.then(|| {
            json!({"id": id, "content": piece.text, "special": piece.kind != USER_DEFINED, "normalized": false, "single_word": false,
                "lstrip": false, "rstrip": false})
        })
    };
    let prefix = if dummy_prefix { "first" } else { "never" };
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if dummy_prefix {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0",
        "added_tokens": pieces.iter().enumerate().filter_map(added).collect::<Vec<_>>(),
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": prefix, "split": false},
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }))
}

fn piece(of: &[u8]) -> Result<Piece<'_>, String> {
    let mut piece = Piece { text: "", score: 0.0, kind: NORMAL };
    for field in Fields(of) {
        match field? {
            (fields::PIECE, Field::Bytes(text)) => {
                piece.text = std::str::from_utf8(text).map_err(|error| format!("a piece: {error}"))?;
            }
            (fields::SCORE, Field::Fixed(bits)) => piece.score = f32::from_bits(bits),
            (fields::KIND, Field::Number(kind)) => piece.kind = kind,
            _ => (),
        }
    }
    Ok(piece)
}

/// Every two pieces that make a third, in the order of the third's score.
fn merges<'a>(pieces: &[Piece<'a>]) -> Vec<[&'a str; 2]> {
    let normal = |(id, piece): (usize, &Piece<'a>)| (piece.kind == NORMAL).then_some((piece.text, id));
    let ids: BTreeMap<&str, usize> = pieces.iter().enumerate().filter_map(normal).collect();
    let mut all = Vec::new();
    for piece in pieces.iter().filter(|piece| piece.kind == NORMAL) {
        for (at, _) in piece.text.char_indices().skip(1) {
            let (a, b) = piece.text.split_at(at);
            if let (Some(&first), Some(&second)) = (ids.get(a), ids.get(b)) {
                all.push((piece.score, first, second, [a, b]));
            }
        }
    }
    all.sort_by(|x, y| y.0.total_cmp(&x.0).then((x.1, x.2).cmp(&(y.1, y.2))));
    all.into_iter().map(|(.., pair)| pair).collect()
}

struct Trainer {
    model: u64,
    is_suffix: bool,
    byte_fallback: bool,
}

impl Default for Trainer {
    fn default() -> Self {
        Self { model: UNIGRAM, is_suffix: false, byte_fallback: false }
    }
}

impl Trainer {
    fn read(of: &[u8]) -> Result<Self, String> {
        let mut trainer = Self::default();
        for field in Fields(of) {
            match field? {
                (fields::MODEL_TYPE, Field::Number(model)) => trainer.model = model,
                (fields::SUFFIX, Field::Number(flag)) => trainer.is_suffix = flag != 0,
                (fields::BYTE_FALLBACK, Field::Number(flag)) => trainer.byte_fallback = flag != 0,
                _ => (),
            }
        }
        Ok(trainer)
    }
}

struct Normalizer {
    has_map: bool,
    dummy_prefix: bool,
    removes_spaces: bool,
    escapes: bool,
}

impl Default for Normalizer {
    fn default() -> Self {
        Self { has_map: false, dummy_prefix: true, removes_spaces: true, escapes: true }
    }
}

impl Normalizer {
    fn read(of: &[u8]) -> Result<Self, String> {
        let mut normalizer = Self::default();
        for field in Fields(of) {
            match field? {
                (fields::CHARSMAP, Field::Bytes(map)) => normalizer.has_map = !map.is_empty(),
                (fields::DUMMY_PREFIX, Field::Number(flag)) => normalizer.dummy_prefix = flag != 0,
                (fields::EXTRA_SPACES, Field::Number(flag)) => normalizer.removes_spaces = flag != 0,
                (fields::ESCAPE, Field::Number(flag)) => normalizer.escapes = flag != 0,
                _ => (),
            }
        }
        Ok(normalizer)
    }
}

/// The fields of a message of protobuf, in their order.
struct Fields<'a>(&'a [u8]);

enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    Fixed(u32),
    Long,
}

impl<'a> Fields<'a> {
    fn number(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = self.0.split_first()?;
            self.0 = rest;
            number |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }

    fn take(&mut self, count: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(count).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    fn field(&mut self) -> Option<(u64, Field<'a>)> {
        let key = self.number()?;
        let field = match key & 7 {
            0 => Field::Number(self.number()?),
            1 => self.take(8).map(|_| Field::Long)?,
            2 => {
                let count = self.number()?;
                Field::Bytes(self.take(count)?)
            }
            5 => Field::Fixed(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, field))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>), String>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or("no model of SentencePiece, or one that is cut off".into()))
    }
}
