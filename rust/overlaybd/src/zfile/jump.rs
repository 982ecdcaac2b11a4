//! Where each compressed block is.

/// Blocks per group: one absolute offset, then relative ones.
const GROUP: usize = 16;

/// Offsets of compressed blocks, at 4.5 bytes per block.
#[derive(Debug)]
pub struct JumpTable {
    groups: Vec<u64>,
    /// Offset of each block, and of the end, from its group's.
    deltas: Vec<u32>,
}

impl JumpTable {
    /// Sums up the block lengths from `start` on. Nothing if a block is shorter than `min` or longer than `max`.
    pub fn build(lengths: &[u8], start: u64, min: u32, max: u32) -> Option<Self> {
        let count = lengths.len() / 4;
        let mut table = Self { groups: Vec::with_capacity(count / GROUP + 1), deltas: Vec::with_capacity(count + 1) };
        let mut at = start;
        table.push(at);
        for length in lengths.chunks_exact(4) {
            let length = u32::from_le_bytes([length[0], length[1], length[2], length[3]]);
            if length < min || length > max {
                return None;
            }
            at += u64::from(length);
            table.push(at);
        }
        Some(table)
    }

    fn push(&mut self, at: u64) {
        if self.deltas.len() % GROUP == 0 {
            self.groups.push(at);
        }
        // A group spans 16 blocks of a bounded length, far below 4 GiB.
        let group = self.groups.last().copied().unwrap_or(at);
        self.deltas.push((at - group) as u32);
    }

    /// Where block `i` starts, which for `i == len()` is where the last one ends.
    pub fn offset(&self, i: usize) -> u64 {
        self.groups[i / GROUP] + u64::from(self.deltas[i])
    }

    /// Number of blocks.
    pub fn len(&self) -> usize {
        self.deltas.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offsets_are_running_sums() {
        let lengths: Vec<u32> = (0..100).map(|i| 5 + i * 37 % 4000).collect();
        let bytes: Vec<u8> = lengths.iter().flat_map(|length| length.to_le_bytes()).collect();
        let table = JumpTable::build(&bytes, 512, 5, 4100).expect("valid");
        assert_eq!(table.len(), 100);
        let mut at = 512;
        for (i, length) in lengths.iter().enumerate() {
            assert_eq!(table.offset(i), at);
            at += u64::from(*length);
        }
        assert_eq!(table.offset(100), at);
        assert!(JumpTable::build(&bytes, 512, 6, 4100).is_none());
        assert!(JumpTable::build(&bytes, 512, 5, 3000).is_none());
    }
}
