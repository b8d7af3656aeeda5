//! Looks for what candle's reader stops at without a name: a tensor of a type that it does not know.

/// Types by their number in a header, of those that are not read.
const UNREAD: [(u32, &str); 19] = [
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (20, "IQ4_NL"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (23, "IQ4_XS"),
    (24, "I8"),
    (25, "I16"),
    (26, "I32"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (39, "MXFP4"),
];

/// Types that are read: the last number of each run of them.
const READ: [std::ops::RangeInclusive<u32>; 4] = [0..=3, 6..=8, 10..=14, 30..=30];

/// Numbers of types of values: strings, lists.
const STRING: u32 = 8;
const LIST: u32 = 9;

/// The first tensor of a type that is not read, and the type. `None` where the header has none, or cannot be understood.
pub fn unread(file: &[u8]) -> Option<(String, String)> {
    let mut file = Header { rest: file.get(4..)?, is_wide: true };
    file.is_wide = file.word()? > 1;
    let (tensors, values) = (file.length()?, file.length()?);
    for _ in 0..values {
        file.text()?;
        let kind = file.word()?;
        file.skip_value(kind, 0)?;
    }
    for _ in 0..tensors {
        let name = file.text()?;
        for _ in 0..file.word()? {
            file.length()?;
        }
        let kind = file.word()?;
        file.take(8)?;
        if !READ.iter().any(|read| read.contains(&kind)) {
            let known = UNREAD.iter().find(|(number, _)| *number == kind);
            return Some((name, known.map_or(format!("of number {kind}"), |(_, kind)| (*kind).into())));
        }
    }
    None
}

struct Header<'a> {
    rest: &'a [u8],
    /// Lengths have 8 bytes, as from version 2 on.
    is_wide: bool,
}

impl<'a> Header<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(count)?;
        self.rest = rest;
        Some(taken)
    }

    fn word(&mut self) -> Option<u32> {
        Some(u32::from_le_bytes(self.take(4)?.try_into().ok()?))
    }

    fn length(&mut self) -> Option<usize> {
        match self.is_wide {
            true => usize::try_from(u64::from_le_bytes(self.take(8)?.try_into().ok()?)).ok(),
            false => self.word().map(|length| length as usize),
        }
    }

    fn text(&mut self) -> Option<String> {
        let length = self.length()?;
        Some(String::from_utf8_lossy(self.take(length)?).into_owned())
    }

    fn skip_value(&mut self, kind: u32, depth: usize) -> Option<()> {
        let bytes = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            STRING => {
                let length = self.length()?;
                return self.take(length).map(drop);
            }
            LIST if depth < 8 => {
                let (kind, count) = (self.word()?, self.length()?);
                for _ in 0..count {
                    self.skip_value(kind, depth + 1)?;
                }
                return Some(());
            }
            _ => return None,
        };
        self.take(bytes).map(drop)
    }
}
