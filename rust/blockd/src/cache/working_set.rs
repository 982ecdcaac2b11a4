//! Working sets: which blocks of a stack of layers were touched, in which order, as a file
//! (`docs/formats/blockd-cache.md`).

use std::io::{self, Read, Write};
use std::path::Path;

use overlaybd::Digest;
use sha2::{Digest as _, Sha256};

use super::layout::{blocks_of, BLOCK, MAX_LAYER};

const MAGIC: &[u8; 8] = b"AENVWSET";
const VERSION: u32 = 1;
const HEAD: usize = 24;
const LAYER: usize = 40;
const TOUCH: usize = 8;
/// As overlaybd allows.
const MAX_LAYERS: usize = 255;
/// A file of 32 MiB; with every block touched on its own, 1 TiB of layer.
const MAX_TOUCHES: usize = 4 << 20;

/// Why a working set cannot be used.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum WorkingSetError {
    /// the working set is damaged or no working set: {0}
    Damaged(&'static str),
    /// reading or writing the working set failed
    Io(#[from] io::Error),
}

/// Names one layer of a stack, whatever stack it is in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LayerId {
    /// The layer's SHA-256, or that of its name.
    pub id: [u8; 32],
    /// Its bytes.
    pub size: u64,
}

impl LayerId {
    /// By digest if there is one, else by what the layer is called (path, or URL without query).
    pub fn new(digest: Option<Digest>, name: &str, size: u64) -> Self {
        Self { id: digest.map_or_else(|| Sha256::digest(name.as_bytes()).into(), |digest| digest.0), size }
    }
}

/// Blocks touched one after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Touch {
    /// Index into the layers.
    pub layer: u8,
    /// First block.
    pub first: u32,
    /// How many, at least 1.
    pub count: u16,
}

/// The order in which a stack's blocks were first touched.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WorkingSet {
    /// The layers touches refer to.
    pub layers: Vec<LayerId>,
    /// In order.
    pub touches: Vec<Touch>,
}

impl WorkingSet {
    /// All blocks.
    pub fn blocks(&self) -> u64 {
        self.touches.iter().map(|touch| u64::from(touch.count)).sum()
    }

    /// Adds a block, to the last touch if it continues that one. False if there are too many touches.
    pub fn push(&mut self, layer: u8, block: u32) -> bool {
        if let Some(last) = self.touches.last_mut() {
            if last.layer == layer && last.count < u16::MAX && last.first + u32::from(last.count) == block {
                last.count += 1;
                return true;
            }
        }
        let room = self.touches.len() < MAX_TOUCHES;
        if room {
            self.touches.push(Touch { layer, first: block, count: 1 });
        }
        room
    }

    /// As a file: header, layers, touches, CRC-32C of all that; little-endian.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD + self.layers.len() * LAYER + self.touches.len() * TOUCH + 4);
        out.extend_from_slice(MAGIC);
        for word in [VERSION, BLOCK as u32, self.layers.len() as u32, self.touches.len() as u32] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for layer in &self.layers {
            out.extend_from_slice(&layer.id);
            out.extend_from_slice(&layer.size.to_le_bytes());
        }
        for touch in &self.touches {
            out.extend_from_slice(&touch.first.to_le_bytes());
            out.extend_from_slice(&touch.count.to_le_bytes());
            out.extend_from_slice(&[touch.layer, 0]);
        }
        out.extend_from_slice(&crc32c::crc32c(&out).to_le_bytes());
        out
    }

    /// Reads a file's bytes. Everything is checked: what comes out refers only to blocks that its layers have, and to no
    /// more of them than there are.
    ///
    /// # Errors
    /// [`WorkingSetError::Damaged`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WorkingSetError> {
        let wrong = WorkingSetError::Damaged;
        let (head, rest) = bytes.split_first_chunk::<HEAD>().ok_or(wrong("too short"))?;
        let word = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        if &head[..8] != MAGIC || word(8) != VERSION {
            return Err(wrong("unknown format or version"));
        }
        if u64::from(word(12)) != BLOCK {
            return Err(wrong("made for another block size"));
        }
        let (layers, touches) = (word(16) as usize, word(20) as usize);
        if layers > MAX_LAYERS || touches > MAX_TOUCHES {
            return Err(wrong("too many entries"));
        }
        if rest.len() != layers * LAYER + touches * TOUCH + 4 {
            return Err(wrong("truncated or too long"));
        }
        let (body, sum) = bytes.split_at(bytes.len() - 4);
        if crc32c::crc32c(body).to_le_bytes() != *sum {
            return Err(wrong("its checksum does not match"));
        }
        let (layer_part, touch_part) = rest[..rest.len() - 4].split_at(layers * LAYER);
        let mut set = Self::default();
        for part in layer_part.chunks_exact(LAYER) {
            let (id, size) = part.split_first_chunk::<32>().ok_or(wrong("truncated"))?;
            let size = u64::from_le_bytes(size.try_into().map_err(|_| wrong("truncated"))?);
            if size == 0 || size > MAX_LAYER {
                return Err(wrong("an impossible layer size"));
            }
            set.layers.push(LayerId { id: *id, size });
        }
        for part in touch_part.chunks_exact(TOUCH) {
            let first = u32::from_le_bytes([part[0], part[1], part[2], part[3]]);
            let count = u16::from_le_bytes([part[4], part[5]]);
            let layer = set.layers.get(usize::from(part[6])).ok_or(wrong("a touch of no layer"))?;
            let end = first.checked_add(u32::from(count)).filter(|end| *end <= blocks_of(layer.size));
            if count == 0 || end.is_none() || part[7] != 0 {
                return Err(wrong("a touch outside its layer"));
            }
            set.touches.push(Touch { layer: part[6], first, count });
        }
        let all: u64 = set.layers.iter().map(|layer| u64::from(blocks_of(layer.size))).sum();
        if set.blocks() > all {
            return Err(wrong("more touches than blocks"));
        }
        Ok(set)
    }

    /// Writes a file: a temporary one beside it, synced, renamed.
    ///
    /// # Errors
    /// [`WorkingSetError::Io`].
    pub fn save(&self, path: &Path) -> Result<(), WorkingSetError> {
        let mut name = std::ffi::OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(".partial");
        let temporary = path.with_file_name(name);
        let mut file = std::fs::File::create(&temporary)?;
        file.write_all(&self.encode())?;
        file.sync_all()?;
        Ok(std::fs::rename(&temporary, path)?)
    }

    /// Reads a file, of at most the size a working set can have.
    ///
    /// # Errors
    /// [`WorkingSetError`].
    pub fn load(path: &Path) -> Result<Self, WorkingSetError> {
        let most = HEAD + MAX_LAYERS * LAYER + MAX_TOUCHES * TOUCH + 4;
        let mut bytes = Vec::new();
        std::fs::File::open(path)?.take(most as u64 + 1).read_to_end(&mut bytes)?;
        Self::decode(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> WorkingSet {
        let layers = vec![LayerId::new(None, "a", 10 * BLOCK), LayerId::new(Some(Digest([7; 32])), "b", BLOCK + 1)];
        let mut set = WorkingSet { layers, touches: Vec::new() };
        for (layer, block) in [(0, 4), (0, 5), (0, 6), (1, 1), (0, 7), (0, 0), (1, 0)] {
            assert!(set.push(layer, block));
        }
        set
    }

    #[test]
    fn a_set_survives_the_file() {
        let set = sample();
        assert_eq!(set.touches.len(), 5);
        assert_eq!(set.touches[0], Touch { layer: 0, first: 4, count: 3 });
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("set");
        set.save(&path).unwrap();
        assert_eq!(WorkingSet::load(&path).unwrap(), set);
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_bytes_are_those_of_the_format() {
        let mut set = WorkingSet { layers: vec![LayerId { id: [3; 32], size: BLOCK }], touches: Vec::new() };
        set.push(0, 0);
        let mut expected = b"AENVWSET\x01\0\0\0\0\0\x04\0\x01\0\0\0\x01\0\0\0".to_vec();
        expected.extend_from_slice(&[3; 32]);
        expected.extend_from_slice(&[0, 0, 4, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(&[0, 0, 0, 0, 1, 0, 0, 0]);
        expected.extend_from_slice(&crc32c::crc32c(&expected).to_le_bytes());
        assert_eq!(set.encode(), expected);
    }

    #[test]
    fn hostile_files_are_errors() {
        let good = sample().encode();
        for at in 0..good.len() {
            let mut damaged = good.clone();
            damaged[at] ^= 0x10;
            assert!(WorkingSet::decode(&damaged).is_err(), "byte {at}");
            assert!(WorkingSet::decode(&good[..at]).is_err(), "length {at}");
        }
        // With a right checksum, too.
        let sealed = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = good[..good.len() - 4].to_vec();
            change(&mut bytes);
            bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
            WorkingSet::decode(&bytes)
        };
        let touches = HEAD + 2 * LAYER;
        assert!(sealed(&|_| ()).is_ok());
        assert!(sealed(&|bytes| bytes[touches + 6] = 2).is_err(), "no such layer");
        assert!(sealed(&|bytes| bytes[touches] = 8).is_err(), "past the end");
        assert!(sealed(&|bytes| bytes[touches..touches + 4].fill(0xff)).is_err(), "overflow");
        assert!(sealed(&|bytes| bytes[touches + 4] = 0).is_err(), "nothing");
        assert!(sealed(&|bytes| bytes[20..24].fill(0xff)).is_err(), "absurd count");
        assert!(sealed(&|bytes| bytes[HEAD + 32..HEAD + 40].fill(0xff)).is_err(), "absurd size");
        let repeat = |bytes: &mut Vec<u8>| (0..2).for_each(|_| bytes[touches + 8..].copy_within(..8, 8));
        assert!(sealed(&|bytes| {
            repeat(bytes);
            bytes[touches..touches + 8].copy_from_slice(&[0, 0, 0, 0, 10, 0, 0, 0]);
            bytes[touches + 8..touches + 16].copy_from_slice(&[0, 0, 0, 0, 10, 0, 0, 0]);
        })
        .is_err());
    }
}
