//! One index entry, kept in memory exactly as on disk: 16 bytes.

use std::fmt;

const OFFSET_BITS: u32 = 50;
const PLACE_BITS: u32 = 55;
const OFFSET_MASK: u64 = (1 << OFFSET_BITS) - 1;
const PLACE_MASK: u64 = (1 << PLACE_BITS) - 1;
const ZERO_BIT: u64 = 1 << PLACE_BITS;
const TAG_SHIFT: u32 = 56;

/// Maps a run of logical sectors to sectors of a layer's file, or to zeroes.
///
/// `tag` names the layer in a merged index; on disk it is 0.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// offset:50, length:14
    logical: u64,
    /// moffset:55, zeroed:1, tag:8
    place: u64,
}

impl Extent {
    /// Bytes of an entry.
    pub const SIZE: usize = 16;
    /// The offset that marks a padding entry, and so the end of what can be addressed.
    pub const MAX_OFFSET: u64 = OFFSET_MASK;
    /// The longest run, in sectors.
    pub const MAX_LEN: u64 = (1 << 14) - 1;

    /// A run of `len` sectors stored from sector `place` of the file on.
    ///
    /// The caller keeps to the field widths: `offset + len <= MAX_OFFSET`, `1 <= len <= MAX_LEN`.
    pub fn data(offset: u64, len: u64, place: u64) -> Self {
        debug_assert!((1..=Self::MAX_LEN).contains(&len) && offset + len <= Self::MAX_OFFSET);
        debug_assert!(place <= PLACE_MASK);
        Self { logical: offset | (len << OFFSET_BITS), place }
    }

    /// A run that reads as zeroes. `place` is only informative; overlaybd wants it inside the file.
    pub fn zero(offset: u64, len: u64, place: u64) -> Self {
        let mut extent = Self::data(offset, len, place);
        extent.place |= ZERO_BIT;
        extent
    }

    /// The entry that fills an index up to its block size.
    pub const PADDING: Self = Self { logical: OFFSET_MASK, place: 0 };

    /// First logical sector.
    pub fn offset(&self) -> u64 {
        self.logical & OFFSET_MASK
    }

    /// Length in sectors.
    pub fn len(&self) -> u64 {
        self.logical >> OFFSET_BITS
    }

    /// Logical sector after the last.
    pub fn end(&self) -> u64 {
        self.offset() + self.len()
    }

    /// First sector in the layer's file.
    pub fn place(&self) -> u64 {
        self.place & PLACE_MASK
    }

    /// Whether the run reads as zeroes.
    pub fn is_zero(&self) -> bool {
        self.place & ZERO_BIT != 0
    }

    /// The layer, in a merged index.
    pub fn tag(&self) -> u8 {
        (self.place >> TAG_SHIFT) as u8
    }

    /// The same run in another layer.
    pub fn with_tag(self, tag: u8) -> Self {
        let place = (self.place & (PLACE_MASK | ZERO_BIT)) | (u64::from(tag) << TAG_SHIFT);
        Self { place, ..self }
    }

    /// The part that lies in `start..end`, which must overlap this run.
    pub fn trim(self, start: u64, end: u64) -> Self {
        let from = self.offset().max(start);
        let to = self.end().min(end);
        debug_assert!(from < to);
        let skipped = if self.is_zero() { 0 } else { from - self.offset() };
        Self { logical: from | ((to - from) << OFFSET_BITS), place: self.place + skipped }
    }

    /// This run and the one that follows as a single entry, if they are contiguous here and in the file.
    pub fn join(self, next: Self) -> Option<Self> {
        let len = self.len() + next.len();
        let contiguous =
            if self.is_zero() { next.is_zero() } else { !next.is_zero() && self.place() + self.len() == next.place() };
        (contiguous && self.end() == next.offset() && self.tag() == next.tag() && len <= Self::MAX_LEN)
            .then_some(Self { logical: self.offset() | (len << OFFSET_BITS), ..self })
    }

    /// Reads an entry.
    pub fn from_bytes(bytes: [u8; Self::SIZE]) -> Self {
        let word = u128::from_le_bytes(bytes);
        Self { logical: word as u64, place: (word >> 64) as u64 }
    }

    /// Writes an entry, with tag 0.
    pub fn to_bytes(self) -> [u8; Self::SIZE] {
        let place = self.with_tag(0).place;
        (u128::from(self.logical) | (u128::from(place) << 64)).to_le_bytes()
    }
}

impl fmt::Debug for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_zero() { "zero" } else { "data" };
        write!(f, "[{}..{} {kind} @{} #{}]", self.offset(), self.end(), self.place(), self.tag())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bit_layout_is_the_formats() {
        // offset 0x123456789ABCD (50 bits), length 0x2ABC (14 bits), moffset 0x5A5A5A5A5A5A5A (55 bits), zeroed.
        let extent = Extent::zero(0x1_2345_6789_ABCD, 0x2ABC, 0x5A_5A5A_5A5A_5A5A);
        let logical: u64 = 0x1_2345_6789_ABCD | (0x2ABC << 50);
        let place: u64 = 0x5A_5A5A_5A5A_5A5A | (1 << 55);
        let mut bytes = [0u8; 16];
        bytes[..8].copy_from_slice(&logical.to_le_bytes());
        bytes[8..].copy_from_slice(&place.to_le_bytes());
        assert_eq!(extent.with_tag(7).to_bytes(), bytes);
        assert_eq!(Extent::from_bytes(bytes), extent);
        assert_eq!((extent.offset(), extent.len(), extent.place()), (0x1_2345_6789_ABCD, 0x2ABC, 0x5A_5A5A_5A5A_5A5A));
        assert_eq!(std::mem::size_of::<Extent>(), 16);
    }

    #[test]
    fn trimming_moves_the_place_of_data_only() {
        let data = Extent::data(100, 10, 50).with_tag(3);
        assert_eq!(data.trim(104, 107), Extent::data(104, 3, 54).with_tag(3));
        assert_eq!(data.trim(0, 1000), data);
        assert_eq!(Extent::zero(100, 10, 50).trim(104, 107), Extent::zero(104, 3, 50));
    }

    #[test]
    fn joins_what_is_contiguous() {
        let data = Extent::data(100, 10, 50);
        assert_eq!(data.join(Extent::data(110, 5, 60)), Some(Extent::data(100, 15, 50)));
        assert_eq!(data.join(Extent::data(110, 5, 61)), None);
        assert_eq!(data.join(Extent::data(111, 5, 60)), None);
        assert_eq!(data.join(Extent::data(110, 5, 60).with_tag(1)), None);
        assert_eq!(data.join(Extent::zero(110, 5, 60)), None);
        assert_eq!(data.join(Extent::data(110, Extent::MAX_LEN, 60)), None);
        assert_eq!(Extent::zero(0, 1, 9).join(Extent::zero(1, 1, 12)), Some(Extent::zero(0, 2, 9)));
    }
}
