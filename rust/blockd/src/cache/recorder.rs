//! Recording a working set.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use overlaybd::ByteSource;

use super::flight::lock;
use super::layout::{blocks_of, BLOCK};
use super::working_set::{LayerId, WorkingSet};

/// Notes which blocks of a stack are touched first, and in which order. One bit of memory per block of the stack, eight
/// bytes per run of touches.
pub struct Recorder {
    seen: Vec<Box<[AtomicU64]>>,
    set: Mutex<WorkingSet>,
    active: AtomicBool,
}

impl Recorder {
    /// A recorder for a stack of these layers, bottom first. At most 255; touches of further ones are not recorded.
    pub fn new(layers: Vec<LayerId>) -> Arc<Self> {
        let bits = |layer: &LayerId| (blocks_of(layer.size) as usize).div_ceil(64);
        let seen = layers.iter().map(|layer| std::iter::repeat_with(AtomicU64::default).take(bits(layer)).collect());
        Arc::new(Self {
            seen: seen.collect(),
            set: Mutex::new(WorkingSet { layers, touches: Vec::new() }),
            active: AtomicBool::new(true),
        })
    }

    /// `source`, the stack's layer number `layer`, with its reads recorded.
    pub fn wrap(self: &Arc<Self>, layer: u8, source: Arc<dyn ByteSource>) -> Recorded {
        Recorded { recorder: self.clone(), layer, source }
    }

    /// Ends the recording.
    pub fn stop(&self) {
        self.active.store(false, Relaxed);
    }

    /// What was touched so far.
    pub fn working_set(&self) -> WorkingSet {
        lock(&self.set).clone()
    }

    fn note(&self, layer: u8, start: u64, len: usize) {
        let Some(seen) = self.seen.get(usize::from(layer)).filter(|_| len > 0) else { return };
        for block in start / BLOCK..=(start.saturating_add(len as u64 - 1)) / BLOCK {
            let (Some(word), bit) = (seen.get((block / 64) as usize), 1 << (block % 64)) else { return };
            if word.load(Relaxed) & bit == 0
                && word.fetch_or(bit, Relaxed) & bit == 0
                && !lock(&self.set).push(layer, block as u32)
            {
                self.stop();
            }
        }
    }
}

/// A layer whose reads are recorded.
pub struct Recorded {
    recorder: Arc<Recorder>,
    layer: u8,
    source: Arc<dyn ByteSource>,
}

impl ByteSource for Recorded {
    fn size(&self) -> u64 {
        self.source.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        if self.recorder.active.load(Relaxed) {
            self.recorder.note(self.layer, offset, buf.len());
        }
        self.source.read_exact_at(buf, offset)
    }

    /// Not while recording: bytes moved past this trait would not be seen.
    fn as_file(&self) -> Option<&File> {
        self.source.as_file().filter(|_| !self.recorder.active.load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use overlaybd::MemorySource;

    #[test]
    fn first_touches_are_noted_in_order() {
        let size = 3 * BLOCK;
        let id = LayerId::new(None, "a", size);
        let recorder = Recorder::new(vec![id, id]);
        let source: Arc<dyn ByteSource> = Arc::new(MemorySource::new(vec![0; size as usize]));
        let layers = [recorder.wrap(0, source.clone()), recorder.wrap(1, source)];
        let mut buf = [0; 2];
        for (layer, offset) in [(1, 2 * BLOCK), (0, BLOCK - 1), (1, 2 * BLOCK + 5), (1, 0), (0, 0)] {
            layers[layer].read_exact_at(&mut buf, offset).unwrap();
        }
        assert!(layers[0].read_exact_at(&mut buf, u64::MAX).is_err());
        recorder.stop();
        layers[0].read_exact_at(&mut buf, 2 * BLOCK).unwrap();
        let touches: Vec<_> = recorder.working_set().touches.iter().map(|t| (t.layer, t.first, t.count)).collect();
        assert_eq!(touches, [(1, 2, 1), (0, 0, 2), (1, 0, 1)]);
    }
}
