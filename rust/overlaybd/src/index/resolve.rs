//! Looking up where a range of sectors lives, through one or more tables.

use crate::index::Table;
use crate::lsmt::Extent;

/// Where a segment's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// No layer says anything: reads as zeroes.
    Hole,
    /// A layer says zeroes, hiding what is beneath.
    Zero,
    /// In a layer's file.
    Data {
        /// The layer, counted from the bottom of the stack; the upper is the one after the last.
        layer: u16,
        /// First sector in that layer's file.
        sector: u64,
    },
}

/// A run of logical sectors that lives in one place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// First logical sector.
    pub offset: u64,
    /// Length in sectors.
    pub len: u64,
    /// Where it is.
    pub place: Place,
}

impl Segment {
    /// Logical sector after the last.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }

    /// An extent as a segment of the given layer.
    pub fn of(extent: Extent, layer: u16) -> Self {
        let place = match extent.is_zero() {
            true => Place::Zero,
            false => Place::Data { layer, sector: extent.place() },
        };
        Self { offset: extent.offset(), len: extent.len(), place }
    }

    /// Appends a segment, joining it with the last one where both are one run in one place.
    pub fn push(segments: &mut Vec<Segment>, next: Segment) {
        if let Some(last) = segments.last_mut() {
            let continues = match (last.place, next.place) {
                (Place::Data { layer: a, sector: x }, Place::Data { layer: b, sector: y }) => {
                    a == b && x + last.len == y
                }
                (a, b) => a == b,
            };
            if continues && last.end() == next.offset {
                last.len += next.len;
                return;
            }
        }
        segments.push(next);
    }
}

/// The entries of a sorted table that overlap `start..end`, trimmed to it. O(log n) to the first.
pub fn overlapping(table: &[Extent], start: u64, end: u64) -> impl Iterator<Item = Extent> + '_ {
    let first = table.partition_point(|extent| extent.end() <= start);
    table[first..].iter().take_while(move |extent| extent.offset() < end).map(move |extent| extent.trim(start, end))
}

/// Splits `start..end` by where it lives; `levels` are searched from the first, which hides the others.
pub fn resolve(levels: &[Table], start: u64, end: u64, out: &mut Vec<Segment>) {
    if start >= end {
        return;
    }
    let Some((level, beneath)) = levels.split_first() else {
        Segment::push(out, Segment { offset: start, len: end - start, place: Place::Hole });
        return;
    };
    let mut at = start;
    for extent in overlapping(level, start, end) {
        resolve(beneath, at, extent.offset(), out);
        Segment::push(out, Segment::of(extent, extent.tag().into()));
        at = extent.end();
    }
    resolve(beneath, at, end, out);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upper_levels_hide_lower_ones() {
        let top: Table = vec![Extent::data(10, 10, 8).with_tag(1), Extent::zero(30, 5, 8).with_tag(1)].into();
        let base: Table = vec![Extent::data(0, 15, 100), Extent::data(18, 22, 200)].into();
        let mut out = Vec::new();
        resolve(&[top, base], 5, 50, &mut out);
        let data = |layer, sector| Place::Data { layer, sector };
        let expected = [
            (5, 5, data(0, 105)),
            (10, 10, data(1, 8)),
            (20, 10, data(0, 202)),
            (30, 5, Place::Zero),
            (35, 5, data(0, 217)),
            (40, 10, Place::Hole),
        ];
        assert_eq!(out, expected.map(|(offset, len, place)| Segment { offset, len, place }));
    }
}
