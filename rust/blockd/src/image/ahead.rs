//! Reading ahead of sequential readers.
//!
//! The kernel does so within one file and one descriptor. What a reader of an image wants next may lie in any of its
//! layers, and in each of them the reader jumps.

use std::ops::Range;
use std::sync::mpsc::{sync_channel, Receiver, SyncSender};
use std::sync::{Arc, LazyLock, Mutex, Weak};

use super::Attached;

/// Readers of one image that are followed at once.
const STREAMS: usize = 4;
/// Bytes read in sequence before anything is read ahead.
const LEAST: u64 = 128 << 10;
/// Most bytes read ahead. Where the reader does not jump the kernel reads ahead by itself, on fast disks 8 MiB of each
/// layer, and of all layers at about the same time: what a jump needs waits behind that, so it must be asked for earlier.
const MOST: u64 = 16 << 20;
/// Most bytes between two reads of one sequence, as reads in flight together arrive in any order.
const NEAR: u64 = 2 << 20;
/// Ranges that may wait for the thread. More than a few means that the disk is behind, and further ones are forgotten.
const QUEUE: usize = 64;
/// Stack of the thread.
const STACK: usize = 256 << 10;

/// One sequential reader.
#[derive(Debug, Clone, Copy, Default)]
struct Stream {
    /// End of what it has read.
    next: u64,
    /// Bytes it has read in sequence, up to [`MOST`].
    run: u64,
    /// End of what was read ahead for it.
    ahead: u64,
}

/// Finds the sequential readers of an image among its reads.
#[derive(Debug, Default)]
pub struct ReadAhead(Mutex<[Stream; STREAMS]>);

impl ReadAhead {
    /// Notes a read of an image of `size` bytes; gives what should be read ahead now.
    ///
    /// As much as has been read in sequence, up to [`MOST`]: a short sequence wastes little, a long one is soon at full speed.
    pub fn note(&self, offset: u64, len: u64, size: u64) -> Option<Range<u64>> {
        // Whoever holds the lock notes a read of the same moment, which is enough.
        let mut streams = self.0.try_lock().ok()?;
        // Reads that are in flight together arrive in any order, the first two as well.
        let continues = |stream: &Stream| offset.abs_diff(stream.next) <= (2 * stream.run).min(NEAR);
        let found = streams.iter().position(continues);
        // The least recently seen one gives way to a new one.
        let seen = found.unwrap_or(STREAMS - 1);
        streams[..=seen].rotate_right(1);
        let (stream, end) = (&mut streams[0], offset.saturating_add(len));
        if found.is_none() {
            *stream = Stream { next: end, run: len.min(MOST), ahead: end };
            return None;
        }
        let grown = end.saturating_sub(stream.next);
        stream.next += grown;
        stream.run = stream.run.saturating_add(grown).min(MOST);
        stream.ahead = stream.ahead.max(stream.next);
        let until = stream.next.saturating_add(stream.run).min(size);
        if stream.run < LEAST || stream.ahead - stream.next > stream.run / 8 * 7 || until <= stream.ahead {
            return None;
        }
        Some(std::mem::replace(&mut stream.ahead, until)..until)
    }
}

type Job = (Weak<Attached>, Range<u64>);

/// The thread of all images, there from the first use on. To find room in the page cache and a place in the disk's queue takes
/// longer than to read what is there, and the reader would wait for it.
static THREAD: LazyLock<Option<SyncSender<Job>>> = LazyLock::new(|| {
    let (jobs, queue) = sync_channel(QUEUE);
    match std::thread::Builder::new().name("ahead".into()).stack_size(STACK).spawn(move || work(&queue)) {
        Ok(_) => Some(jobs),
        Err(error) => {
            tracing::warn!(%error, "no thread to read ahead");
            None
        }
    }
});

/// Has a range of an image read ahead soon, or never if much is to be.
pub fn soon(image: &Arc<Attached>, range: Range<u64>) {
    if let Some(jobs) = &*THREAD {
        // Full: what is not read ahead is read when it is wanted.
        let _ = jobs.try_send((Arc::downgrade(image), range));
    }
}

fn work(queue: &Receiver<Job>) {
    for (image, range) in queue {
        // Detached images need nothing any more.
        if let Some(image) = image.upgrade() {
            image.fetch(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1 << 10;
    const SIZE: u64 = 64 << 20;

    #[test]
    fn everything_is_read_ahead_once_and_in_time() {
        for block in [4 * K, 64 * K, 128 * K, 256 * K] {
            let (ahead, mut until) = (ReadAhead::default(), 0);
            for at in (0..SIZE).step_by(block as usize) {
                if let Some(range) = ahead.note(at, block, SIZE) {
                    assert!(range.start == until || until == 0, "{range:?} after {until}");
                    assert!(range.end <= SIZE && range.end - at <= MOST + block);
                    until = range.end;
                }
                assert!(at < 2 * LEAST || until > at + block || until == SIZE, "late at {at}");
            }
            assert_eq!(until, SIZE);
        }
    }

    #[test]
    fn several_readers_and_swapped_reads_are_sequences() {
        let ahead = ReadAhead::default();
        let mut found = [0; STREAMS];
        for step in 0..32 {
            // Each pair of reads arrives in the wrong order.
            let at = (step ^ 1) * 64 * K;
            for (reader, found) in (0..).zip(&mut found) {
                *found += u32::from(ahead.note(reader * (SIZE / 4) + at, 64 * K, SIZE).is_some());
            }
        }
        assert!(found.iter().all(|found| *found > 3), "{found:?}");
    }

    #[test]
    fn others_are_left_alone() {
        let ahead = ReadAhead::default();
        for n in 0..10_000u64 {
            // Random, then the same again and again, then backwards, then absurd.
            assert_eq!(ahead.note(n * 0x9E37_79B1 % SIZE / K * K, 4 * K, 16 * SIZE), None);
            assert_eq!(ahead.note(SIZE, 64 * K, 16 * SIZE), None);
            assert_eq!(ahead.note(9 * SIZE - n * 4 * K, 4 * K, 16 * SIZE), None);
            assert_eq!(ahead.note(u64::MAX - n, u64::MAX, 16 * SIZE), None);
        }
    }
}
