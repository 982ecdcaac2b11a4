//! The mutable index of a writable upper.
//!
//! Sorted extents in chunks of at most [`CHUNK`]: an update moves a few kilobytes at most, a lookup bisects the
//! chunk starts and then one chunk, and capacity grows in small steps so that memory stays below
//! 24 bytes per extent.

use crate::index::overlapping;
use crate::lsmt::Extent;

/// Most extents in a chunk.
const CHUNK: usize = 256;
/// By how many extents a full chunk's capacity grows.
const GROWTH: usize = 32;

/// A sorted set of disjoint extents.
#[derive(Debug, Default)]
pub struct ExtentMap {
    /// First sector of each chunk, apart from the chunks so that bisecting stays in few cache lines.
    starts: Vec<u64>,
    /// Never empty inside.
    chunks: Vec<Vec<Extent>>,
    len: usize,
    data_sectors: u64,
}

impl ExtentMap {
    /// Takes a sorted, disjoint index, joining contiguous entries.
    pub fn from_sorted(extents: impl IntoIterator<Item = Extent>) -> Self {
        let mut map = Self::default();
        for extent in extents {
            let appended = map.append(extent);
            debug_assert!(appended, "{extent:?} is out of order");
        }
        map
    }

    /// Maps a run behind all others, without looking for its place. False, and nothing done, if it does not lie there.
    pub fn append(&mut self, extent: Extent) -> bool {
        /// Leaves room for later insertions.
        const FILL: usize = CHUNK * 3 / 4;
        if let Some(chunk) = self.chunks.last_mut() {
            if let Some(last) = chunk.last_mut() {
                if extent.offset() < last.end() {
                    return false;
                }
                if let Some(joined) = last.join(extent) {
                    self.data_sectors += data_len(&extent);
                    *last = joined;
                    return true;
                }
            }
            if chunk.len() < FILL {
                insert_at(chunk, chunk.len(), extent);
                self.len += 1;
                self.data_sectors += data_len(&extent);
                return true;
            }
        }
        self.data_sectors += data_len(&extent);
        self.len += 1;
        self.starts.push(extent.offset());
        // Most of what follows a full chunk fills another one.
        let mut chunk = Vec::with_capacity(if self.chunks.is_empty() { 1 } else { FILL });
        chunk.push(extent);
        self.chunks.push(chunk);
        true
    }

    /// Number of extents.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Sectors mapped to data rather than zeroes.
    pub fn data_sectors(&self) -> u64 {
        self.data_sectors
    }

    /// The whole index, sorted.
    pub fn to_vec(&self) -> Vec<Extent> {
        let mut out = Vec::with_capacity(self.len);
        self.chunks.iter().for_each(|chunk| out.extend_from_slice(chunk));
        out
    }

    /// Where a run of data is, if all of it lies in one piece.
    pub fn place_of(&self, start: u64, len: u64) -> Option<u64> {
        let end = start + len;
        let (mut place, mut at) = (None, start);
        for chunk in self.chunks.get(self.chunk_for(start)..)? {
            for extent in overlapping(chunk, at, end) {
                let first = *place.get_or_insert(extent.place());
                if extent.is_zero() || extent.offset() != at || extent.place() != first + (at - start) {
                    return None;
                }
                at = extent.end();
            }
            if at == end || chunk.last().is_some_and(|last| last.end() > at) {
                break;
            }
        }
        place.filter(|_| at == end)
    }

    /// Visits the extents that overlap `start..end`, trimmed to it, in order.
    pub fn for_each_overlapping(&self, start: u64, end: u64, mut visit: impl FnMut(Extent)) {
        for chunk in &self.chunks[self.chunk_for(start)..] {
            if chunk[0].offset() >= end {
                break;
            }
            overlapping(chunk, start, end).for_each(&mut visit);
        }
    }

    /// Maps a run, replacing whatever was mapped there.
    pub fn insert(&mut self, extent: Extent) {
        self.remove(extent.offset(), extent.end());
        self.data_sectors += data_len(&extent);
        if self.chunks.is_empty() {
            self.starts.push(extent.offset());
            self.chunks.push(vec![extent]);
            self.len = 1;
            return;
        }
        let i = self.chunk_for(extent.offset());
        let is_last = i + 1 == self.chunks.len();
        let chunk = &mut self.chunks[i];
        let at = chunk.partition_point(|other| other.offset() < extent.offset());
        if let Some(before) = at.checked_sub(1).map(|before| &mut chunk[before]) {
            if let Some(joined) = before.join(extent) {
                *before = joined;
                return;
            }
        }
        self.len += 1;
        if chunk.len() < CHUNK {
            insert_at(chunk, at, extent);
            self.starts[i] = chunk[0].offset();
        } else if at == CHUNK && is_last {
            // Appending: leave the full chunk full.
            self.starts.push(extent.offset());
            self.chunks.push(vec![extent]);
        } else {
            let mut right = chunk.split_off(CHUNK / 2);
            chunk.shrink_to(CHUNK / 2 + GROWTH);
            match at.checked_sub(CHUNK / 2) {
                Some(at) if at > 0 => insert_at(&mut right, at, extent),
                _ => insert_at(chunk, at, extent),
            }
            self.starts[i] = chunk[0].offset();
            self.starts.insert(i + 1, right[0].offset());
            self.chunks.insert(i + 1, right);
        }
    }

    /// Unmaps a run.
    pub fn remove(&mut self, start: u64, end: u64) {
        let first = self.chunk_for(start);
        let mut emptied = 0..0;
        for i in first..self.chunks.len() {
            let chunk = &mut self.chunks[i];
            if chunk[0].offset() >= end {
                break;
            }
            let from = chunk.partition_point(|extent| extent.end() <= start);
            let to = from + chunk[from..].partition_point(|extent| extent.offset() < end);
            if from == to {
                continue;
            }
            let (head, tail) = (chunk[from], chunk[to - 1]);
            let kept_head = (head.offset() < start).then(|| head.trim(head.offset(), start));
            let kept_tail = (tail.end() > end).then(|| tail.trim(end, tail.end()));
            let before: u64 = chunk[from..to].iter().map(data_len).sum();
            let after: u64 = kept_head.iter().chain(&kept_tail).map(data_len).sum();
            self.data_sectors -= before - after;
            self.len -= to - from;
            self.len += kept_head.iter().chain(&kept_tail).count();
            chunk.splice(from..to, kept_head.into_iter().chain(kept_tail));
            match chunk.first() {
                Some(extent) => self.starts[i] = extent.offset(),
                None if emptied.is_empty() => emptied = i..i + 1,
                None => emptied.end = i + 1,
            }
        }
        self.starts.drain(emptied.clone());
        self.chunks.drain(emptied);
    }

    /// The last chunk that starts at or before `sector`, else the first.
    fn chunk_for(&self, sector: u64) -> usize {
        self.starts.partition_point(|start| *start <= sector).saturating_sub(1)
    }
}

fn insert_at(chunk: &mut Vec<Extent>, at: usize, extent: Extent) {
    if chunk.len() == chunk.capacity() {
        chunk.reserve_exact(GROWTH);
    }
    chunk.insert(at, extent);
}

fn data_len(extent: &Extent) -> u64 {
    if extent.is_zero() {
        0
    } else {
        extent.len()
    }
}

#[cfg(test)]
impl ExtentMap {
    /// Bytes of heap in use, and whether the structure is sound.
    fn audit(&self) -> usize {
        assert_eq!(self.starts.len(), self.chunks.len());
        let all = self.to_vec();
        assert_eq!(all.len(), self.len);
        assert!(all.windows(2).all(|pair| pair[0].end() <= pair[1].offset()));
        assert_eq!(all.iter().map(data_len).sum::<u64>(), self.data_sectors);
        for (start, chunk) in self.starts.iter().zip(&self.chunks) {
            assert!(!chunk.is_empty() && chunk.len() <= CHUNK + 1);
            assert_eq!(*start, chunk[0].offset());
        }
        let per_chunk = 8 + std::mem::size_of::<Vec<Extent>>();
        self.chunks.iter().map(|chunk| chunk.capacity() * Extent::SIZE).sum::<usize>()
            + self.chunks.capacity() * per_chunk
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::replay;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn equals_a_replayed_log(ops in prop::collection::vec((0..4000u64, 1..400u64, 0..3u8), 0..400)) {
            let (mut map, mut log) = (ExtentMap::default(), Vec::new());
            for (i, (offset, len, kind)) in ops.iter().enumerate() {
                let len = if kind & 1 == 0 { 1 + len % 4 } else { *len };
                let place = 8 + i as u64 * 1000;
                let extent = if *kind == 2 { Extent::zero(*offset, len, place) } else { Extent::data(*offset, len, place) };
                map.insert(extent);
                log.push(extent);
            }
            map.audit();
            let cells = |extents: &[Extent]| {
                let mut cells = vec![None; 5000];
                for e in extents {
                    for s in e.offset()..e.end() {
                        cells[s as usize] = Some((e.is_zero(), if e.is_zero() { 0 } else { e.place() + s - e.offset() }));
                    }
                }
                cells
            };
            prop_assert_eq!(cells(&map.to_vec()), cells(&replay(log)));
            map.remove(100, 3000);
            map.audit();
            let mut seen = 0;
            map.for_each_overlapping(100, 3000, |_| seen += 1);
            prop_assert_eq!(seen, 0);
        }
    }

    /// Blocks of 8 sectors in a pseudo-random order, with gaps so that none join.
    fn scattered(count: u64) -> impl Iterator<Item = Extent> {
        (0..count).map(move |i| Extent::data((i * 0x9E37_79B1 % count) * 16, 8, 8 + i * 8))
    }

    #[test]
    fn memory_stays_below_24_bytes_per_extent() {
        for count in [10_007u64, 100_003] {
            let (mut random, mut ordered) = (ExtentMap::default(), ExtentMap::default());
            for extent in scattered(count) {
                random.insert(extent);
            }
            for i in 0..count {
                ordered.insert(Extent::data(i * 16, 8, 8 + i * 9));
            }
            for map in [&random, &ordered, &ExtentMap::from_sorted(random.to_vec())] {
                assert_eq!(map.len() as u64, count);
                let bytes = map.audit();
                assert!(bytes as u64 <= 24 * count, "{bytes} bytes for {count} extents");
            }
        }
    }

    #[test]
    fn sequential_writes_become_one_extent() {
        let mut map = ExtentMap::default();
        (0..1000).for_each(|i| map.insert(Extent::data(i * 8, 8, 8 + i * 8)));
        assert_eq!(map.to_vec(), [Extent::data(0, 8000, 8)]);
        assert_eq!(map.data_sectors(), 8000);
    }
}
