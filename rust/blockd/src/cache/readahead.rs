//! Telling sequential readers from others.

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::Mutex;

use super::fetch::MAX_RUN;
use super::flight::lock;

/// Sequential streams followed at once in one open layer.
const STREAMS: usize = 4;

/// Follows the readers of one open layer, block by block.
pub(super) struct ReadAhead {
    last: AtomicU32,
    streams: Mutex<Streams>,
}

#[derive(Default)]
struct Streams {
    clock: u64,
    streams: [Stream; STREAMS],
}

#[derive(Default, Clone, Copy)]
struct Stream {
    /// The block that continues the stream.
    next: u32,
    /// Blocks to keep ahead of the reader.
    window: u32,
    /// Up to where blocks were asked for.
    asked: u32,
    used: u64,
}

impl ReadAhead {
    pub(super) fn new() -> Self {
        Self { last: AtomicU32::new(u32::MAX), streams: Mutex::default() }
    }

    /// A reader is in `block`. Returns the blocks that should be fetched ahead of it, if it is sequential: 2 blocks at first,
    /// doubling up to a whole request. Costs one load while the reader stays in a block.
    pub(super) fn note(&self, block: u32) -> Option<Range<u32>> {
        if self.last.load(Relaxed) == block {
            return None;
        }
        self.last.store(block, Relaxed);
        let mut all = lock(&self.streams);
        all.clock += 1;
        let clock = all.clock;
        // Within a stream, again: several threads serve one sequential reader, and their reads overtake each other.
        if let Some(same) = all.streams.iter_mut().find(|s| s.used > 0 && block < s.next && block + 2 >= s.next) {
            same.used = clock;
            return None;
        }
        let continues = |s: &Stream| s.next == block || s.window > 0 && s.next + 1 == block;
        if let Some(stream) = all.streams.iter_mut().find(|s| s.used > 0 && continues(s)) {
            stream.used = clock;
            stream.next = block + 1;
            stream.window = (stream.window * 2).clamp(2, MAX_RUN);
            stream.asked = stream.asked.max(stream.next);
            let wanted = stream.next + stream.window;
            if stream.asked < stream.next + stream.window.div_ceil(2) {
                let range = stream.asked..wanted;
                stream.asked = wanted;
                return Some(range);
            }
            return None;
        }
        if let Some(oldest) = all.streams.iter_mut().min_by_key(|s| s.used) {
            *oldest = Stream { next: block + 1, window: 0, asked: block + 1, used: clock };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequential_readers_get_growing_windows() {
        let ahead = ReadAhead::new();
        assert_eq!(ahead.note(10), None);
        assert_eq!(ahead.note(10), None);
        assert_eq!(ahead.note(11), Some(12..14));
        assert_eq!(ahead.note(12), Some(14..17));
        let mut asked = 17;
        for block in 13..200 {
            if let Some(range) = ahead.note(block) {
                assert_eq!(range.start, asked, "every block is asked for once, in order");
                assert!(range.end - range.start <= MAX_RUN);
                asked = range.end;
            }
            assert!(asked > block, "the reader is never ahead");
        }
        assert!(asked >= 199 + MAX_RUN / 2);
    }

    #[test]
    fn random_readers_get_nothing_and_streams_do_not_disturb_each_other() {
        let ahead = ReadAhead::new();
        for block in (0..1000).step_by(7) {
            assert_eq!(ahead.note(block), None);
        }
        let mut seen = [0; 3];
        for step in 0..20 {
            for (stream, start) in [1_000, 5_000, 9_000].into_iter().enumerate() {
                seen[stream] += u32::from(ahead.note(start + step).is_some());
            }
        }
        assert!(seen.iter().all(|n| *n >= 3), "{seen:?}");
    }
}
