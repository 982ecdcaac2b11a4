//! Merging sorted indexes, newest winning.

use crate::lsmt::Extent;

/// Lays `upper` over `lower`: where both map a sector, `upper` wins. Linear in both.
///
/// Both must be sorted and disjoint; so is the result. Contiguous neighbours are joined.
pub fn overlay(upper: &[Extent], lower: &[Extent]) -> Vec<Extent> {
    let mut out = Vec::with_capacity(upper.len() + lower.len());
    let mut lower = lower.iter().copied();
    // What is left of the lower extent being looked at.
    let mut pending = lower.next();
    for &top in upper {
        while let Some(below) = pending {
            if below.end() <= top.offset() {
                push(&mut out, below);
                pending = lower.next();
            } else if below.offset() < top.offset() {
                push(&mut out, below.trim(below.offset(), top.offset()));
                pending = Some(below.trim(top.offset(), below.end()));
            } else if below.end() <= top.end() {
                pending = lower.next();
            } else {
                if below.offset() < top.end() {
                    pending = Some(below.trim(top.end(), below.end()));
                }
                break;
            }
        }
        push(&mut out, top);
    }
    for below in pending.into_iter().chain(lower) {
        push(&mut out, below);
    }
    out
}

fn push(out: &mut Vec<Extent>, extent: Extent) {
    if let Some(last) = out.last_mut() {
        if let Some(joined) = last.join(extent) {
            *last = joined;
            return;
        }
    }
    out.push(extent);
}

/// Merges any number of sorted indexes, the lowest first.
pub fn merge_all(mut tables: Vec<Vec<Extent>>) -> Vec<Extent> {
    // Halving keeps the work at (entries x log tables), whatever the shapes are.
    match tables.len() {
        0 => Vec::new(),
        1 => tables.remove(0),
        n => {
            let upper = merge_all(tables.split_off(n / 2));
            let lower = merge_all(tables);
            if lower.is_empty() {
                upper
            } else {
                overlay(&upper, &lower)
            }
        }
    }
}

/// Plays a log of extents in the order they were written and gives the index they leave.
pub fn replay(log: Vec<Extent>) -> Vec<Extent> {
    replay_into(log, |index| {
        let mut out = Vec::new();
        index.for_each(|extent| push(&mut out, extent));
        out
    })
}

/// Like [`replay`], but hands over the extents one by one, sorted and disjoint, without making a copy: opening an upper
/// with a long log costs mostly the touching of fresh memory.
pub fn replay_into<R>(log: Vec<Extent>, build: impl FnOnce(&mut dyn Iterator<Item = Extent>) -> R) -> R {
    if is_index(log.iter()) {
        return build(&mut log.into_iter());
    }
    // Sorting by position and keeping the newest of identical runs settles the common logs (blocks of one size
    // written again and again). What still overlaps is merged by halves.
    let order = order_by_offset(&log);
    let at = |i: u64| &log[i as usize];
    let same = |a: &u64, b: &u64| (at(*a).offset(), at(*a).len()) == (at(*b).offset(), at(*b).len());
    let settled = || order.chunk_by(same).filter_map(<[u64]>::last).map(|newest| at(*newest));
    if is_index(settled()) {
        build(&mut settled().copied())
    } else {
        build(&mut replay_by_halves(&log).into_iter())
    }
}

/// Whether entries are sorted and disjoint, which makes their order of writing immaterial.
fn is_index<'a>(entries: impl Iterator<Item = &'a Extent>) -> bool {
    entries.is_sorted_by(|a, b| a.end() <= b.offset())
}

/// Bits of the offset sorted by in one pass.
const RADIX_BITS: u32 = 11;

/// The positions of a log's entries by offset, equal ones in the order they are in.
///
/// Logs of up to 16 million entries of images of up to 512 TiB take a radix
/// sort of 8 bytes per entry: two passes for an image of 2 GiB, three for 4 TiB.
fn order_by_offset(log: &[Extent]) -> Vec<u64> {
    const POSITION_BITS: u32 = 24;
    let all_bits = log.iter().fold(0, |bits, extent| bits | extent.offset());
    let offset_bits = u64::BITS - all_bits.leading_zeros();
    let positions = 0..log.len() as u64;
    if offset_bits + POSITION_BITS > u64::BITS || log.len() >> POSITION_BITS != 0 {
        let mut order: Vec<u64> = positions.collect();
        order.sort_by_key(|i| log[*i as usize].offset());
        return order;
    }
    let mut keys: Vec<u64> = positions.zip(log).map(|(i, extent)| extent.offset() << POSITION_BITS | i).collect();
    let mut other = vec![0; keys.len()];
    for shift in (POSITION_BITS..POSITION_BITS + offset_bits).step_by(RADIX_BITS as usize) {
        let digit = |key: u64| (key >> shift) as usize & ((1 << RADIX_BITS) - 1);
        let mut next = [0u32; 1 << RADIX_BITS];
        keys.iter().for_each(|key| next[digit(*key)] += 1);
        let mut start = 0;
        for slot in &mut next {
            start += std::mem::replace(slot, start);
        }
        for &key in &keys {
            let slot = &mut next[digit(key)];
            other[*slot as usize] = key;
            *slot += 1;
        }
        std::mem::swap(&mut keys, &mut other);
    }
    keys.iter_mut().for_each(|key| *key &= (1 << POSITION_BITS) - 1);
    keys
}

fn replay_by_halves(log: &[Extent]) -> Vec<Extent> {
    // The longest sorted prefix costs nothing to take as it is.
    let sorted = log.windows(2).take_while(|pair| pair[0].end() <= pair[1].offset()).count() + 1;
    if log.len() <= sorted {
        return log.to_vec();
    }
    let middle = if sorted > log.len() / 2 { sorted } else { log.len() / 2 };
    let (older, newer) = log.split_at(middle);
    overlay(&replay_by_halves(newer), &replay_by_halves(older))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SPACE: usize = 200;

    /// One cell per sector: the file sector it maps to, or zero, or nothing.
    fn paint(cells: &mut [Option<(u64, bool, u8)>], extents: &[Extent]) {
        for extent in extents {
            for sector in extent.offset()..extent.end() {
                let place = if extent.is_zero() { 0 } else { extent.place() + sector - extent.offset() };
                cells[sector as usize] = Some((place, extent.is_zero(), extent.tag()));
            }
        }
    }

    fn extents() -> impl Strategy<Value = Vec<Extent>> {
        let one =
            (0..SPACE as u64 - 20, 1..20u64, 8..10_000u64, any::<bool>()).prop_map(|(offset, len, place, zero)| {
                if zero {
                    Extent::zero(offset, len, place)
                } else {
                    Extent::data(offset, len, place)
                }
            });
        prop::collection::vec(one, 0..60)
    }

    fn check(index: &[Extent], logs: &[Vec<Extent>]) {
        for pair in index.windows(2) {
            assert!(pair[0].end() <= pair[1].offset(), "{pair:?}");
        }
        let (mut expected, mut got) = (vec![None; SPACE], vec![None; SPACE]);
        logs.iter().for_each(|log| paint(&mut expected, log));
        paint(&mut got, index);
        assert_eq!(got, expected);
    }

    proptest! {
        #[test]
        fn replay_equals_painting(log in extents()) {
            check(&replay(log.clone()), std::slice::from_ref(&log));
            check(&replay_by_halves(&log), &[log]);
        }

        #[test]
        fn merging_equals_painting_in_order(logs in prop::collection::vec(extents(), 0..6)) {
            let tagged = |(tag, log): (u8, &Vec<Extent>)| log.iter().map(|e| e.with_tag(tag)).collect::<Vec<_>>();
            let logs: Vec<_> = (0u8..).zip(&logs).map(tagged).collect();
            let merged = merge_all(logs.iter().cloned().map(replay).collect());
            check(&merged, &logs);
        }
    }

    #[test]
    fn sorting_is_stable_over_the_whole_range() {
        let offsets = [5u64, 1 << 49, 0, 5, 1 << 33, 2047, 2048, 5, (1 << 50) - 2, 1 << 33];
        // The whole range of offsets, and what the radix sort takes.
        for limit in [u64::MAX, (1 << 40) - 1, (1 << 21) - 1] {
            let offsets = offsets.map(|offset| offset & limit);
            let log = offsets.map(|offset| Extent::data(offset, 1, 8));
            let mut expected: Vec<u64> = (0..log.len() as u64).collect();
            expected.sort_by_key(|i| offsets[*i as usize]);
            assert_eq!(order_by_offset(&log), expected);
        }
    }

    #[test]
    fn identical_runs_keep_the_newest() {
        let log = [Extent::data(8, 8, 100), Extent::data(0, 8, 200), Extent::data(8, 8, 300)];
        assert_eq!(replay(log.to_vec()), [log[1], log[2]]);
    }
}
