//! What is on disk (`docs/formats/blockd-cache.md`).
//!
//! A layer has two sparse files. `KEY.data` holds each cached block at the layer's own offset; `KEY.meta` holds a header
//! page and, per block, one checksum for each 4 KiB of it. Nothing is ever synced: checksums decide what is there.

use sha2::{Digest as _, Sha256};

/// Bytes of a block, the unit of fetching and of eviction.
///
/// Measured (`benches/cache.rs`, origin 2 ms away): with 64 KiB a prefetch of the same bytes runs at 0.37 of the speed, for want
/// of large requests, and a 128 KiB hit costs a quarter more; with 1 MiB nothing gets faster, a cold 4 KiB read moves
/// four times the bytes, and few of the blocks on their way fit into the memory bound.
pub const BLOCK: u64 = 256 * 1024;
/// Bytes under one checksum: a page, so that a hit reads and verifies no more than the pages it needs.
pub(super) const CHUNK: usize = 4096;
/// Checksums of a block.
pub(super) const CHUNKS: usize = BLOCK as usize / CHUNK;
/// Bytes of a block's checksums. A power of two: no entry lies across two sectors.
pub(super) const ENTRY: usize = CHUNKS * 4;
/// Bytes of the header page of a meta file.
pub(super) const HEADER: usize = 4096;
/// Largest layer: the states of its blocks take 4 MiB of memory.
pub const MAX_LAYER: u64 = 1 << 40;
/// Disk space counted for a layer that is there at all: both inodes' extents and the header page.
pub(super) const LAYER_CHARGE: u64 = 16 * 1024;

const MAGIC: &[u8; 8] = b"AENVBLK\x01";

/// The number of blocks of a layer.
pub(super) fn blocks_of(size: u64) -> u32 {
    u32::try_from(size.div_ceil(BLOCK)).unwrap_or(u32::MAX)
}

/// The bytes of block `block` in a layer of `size` bytes.
pub(super) fn block_len(size: u64, block: u32) -> usize {
    (size - u64::from(block) * BLOCK).min(BLOCK) as usize
}

/// Disk space counted for a block: its bytes in whole pages, and a page of checksums in case it shares its with no other.
pub(super) fn block_charge(size: u64, block: u32) -> u64 {
    (block_len(size, block).next_multiple_of(CHUNK) + CHUNK) as u64
}

/// Which layer a pair of files belongs to; also the stem of their names.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(String);

impl Key {
    /// The key of what `parts` say. `kept`: whether the files outlive the last close.
    pub(super) fn new(parts: &[&[u8]], kept: bool) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        let hex: String = hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Self(format!("{}{hex}", if kept { "" } else { "once-" }))
    }

    /// The key whose data or meta file has this name, if it is one that is kept.
    pub(super) fn of_file(name: &str) -> Option<Self> {
        let stem = name.strip_suffix(".data").or_else(|| name.strip_suffix(".meta"))?;
        let hex = stem.len() == 64 && stem.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        hex.then(|| Self(stem.to_owned()))
    }

    /// Whether a file name is one this cache makes.
    pub(super) fn is_ours(name: &str) -> bool {
        Self::of_file(name.strip_prefix("once-").unwrap_or(name)).is_some()
    }

    /// Whether the files outlive the layer's last close.
    pub(super) fn is_kept(&self) -> bool {
        !self.0.starts_with("once-")
    }

    pub(super) fn data(&self) -> String {
        format!("{}.data", self.0)
    }

    pub(super) fn meta(&self) -> String {
        format!("{}.meta", self.0)
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The header page: magic, block size, layer size, the key as text, zeros, checksum of all that.
pub(super) fn encode_header(key: &Key, size: u64) -> [u8; HEADER] {
    let mut page = [0; HEADER];
    page[..8].copy_from_slice(MAGIC);
    page[8..16].copy_from_slice(&BLOCK.to_le_bytes());
    page[16..24].copy_from_slice(&size.to_le_bytes());
    let key = key.0.as_bytes();
    let shown = key.len().min(96);
    page[24..24 + shown].copy_from_slice(&key[..shown]);
    let sum = crc32c::crc32c(&page[..HEADER - 4]);
    page[HEADER - 4..].copy_from_slice(&sum.to_le_bytes());
    page
}

/// The layer size in a header page that is whole and belongs to `key`.
pub(super) fn decode_header(key: &Key, page: &[u8; HEADER]) -> Option<u64> {
    let size = u64::from_le_bytes(page[16..24].try_into().ok()?);
    (size > 0 && size <= MAX_LAYER && encode_header(key, size) == *page).then_some(size)
}

/// The stored checksum of a chunk: CRC-32C seeded with its place, so that a chunk of another place never passes, and never
/// 0, which means absent.
pub(super) fn checksum(chunk: &[u8], block: u32, index: usize) -> u32 {
    let place = block.wrapping_mul(CHUNKS as u32).wrapping_add(index as u32).wrapping_mul(0x9e37_79b1);
    crc32c::crc32c_append(place, chunk).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_survive_and_damage_shows() {
        let key = Key::new(&[b"a", b"b"], true);
        assert_ne!(key, Key::new(&[b"ab", b""], true));
        let page = encode_header(&key, 12345);
        assert_eq!(decode_header(&key, &page), Some(12345));
        assert_eq!(decode_header(&Key::new(&[b"a"], true), &page), None);
        for at in [0, 9, 17, 30, 2000, HEADER - 1] {
            let mut damaged = page;
            damaged[at] ^= 1;
            assert_eq!(decode_header(&key, &damaged), None, "byte {at}");
        }
        assert_eq!(decode_header(&key, &[0; HEADER]), None);
    }

    #[test]
    fn names_round_trip_and_others_are_not_ours() {
        let key = Key::new(&[b"a"], true);
        assert_eq!(Key::of_file(&key.data()), Some(key.clone()));
        assert_eq!(Key::of_file(&key.meta()), Some(key));
        let once = Key::new(&[b"a"], false);
        assert_eq!(Key::of_file(&once.data()), None);
        assert!(Key::is_ours(&once.meta()));
        for name in ["lock", "a.data", &format!("{}.data", "g".repeat(64)), &"0".repeat(64)] {
            assert!(!Key::is_ours(name), "{name}");
        }
    }

    #[test]
    fn the_last_block_is_short() {
        let size = 2 * BLOCK + 5;
        assert_eq!(blocks_of(size), 3);
        assert_eq!(block_len(size, 0), BLOCK as usize);
        assert_eq!(block_len(size, 2), 5);
        assert_eq!(block_charge(size, 2), 8192);
        assert_eq!(blocks_of(MAX_LAYER), 1 << 22);
    }
}
