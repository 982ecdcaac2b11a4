//! The output of one process: a bounded log that any number of clients read at their own pace.
//!
//! Policy:
//! * The log holds at most [`CAPACITY`] bytes, whatever the process and its readers do.
//! * While somebody is attached, nothing that reader has not read is dropped: when the log is full the process's pipe is left
//!   alone, and the process waits, as it would for a slow terminal.
//! * One stalled reader does not hold up the others: after [`STALL_LIMIT`] without reading a byte while another reader has read
//!   everything, it is cut off with an error.
//! * While nobody is attached the oldest output makes room, so a process never waits for a client that has gone.
//!
//! A client that attaches to a running process gets what no client has been given yet, then live output; one that attaches
//! beside others gets live output only. After the end, everything still in the log is given to whoever asks.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::wire::EndEvent;

/// Bytes of output kept per process, bookkeeping included.
pub const CAPACITY: usize = 256 << 10;

/// How long a reader may leave the log full while another has read everything.
pub const STALL_LIMIT: Duration = Duration::from_secs(30);

/// Longest piece of output in one message.
pub const MAX_CHUNK: usize = 32 << 10;

/// Bookkeeping bytes charged per chunk, so that many tiny chunks are bounded too.
const CHUNK_OVERHEAD: usize = 64;

/// Where output came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stream {
    Stdout,
    Stderr,
    Pty,
}

impl Stream {
    /// The field of the data event.
    pub fn field(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
            Self::Pty => "pty",
        }
    }
}

/// What a reader gets next.
#[derive(Debug, PartialEq, Eq)]
pub enum Item {
    /// Output, at most [`MAX_CHUNK`] bytes.
    Data(Stream, Bytes),
    /// The process has ended; there is nothing after this.
    End(EndEvent),
    /// The reader stalled and was cut off.
    CutOff,
}

/// See the module's description.
#[derive(Debug, Default)]
pub struct Output {
    log: Mutex<Log>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Log {
    chunks: VecDeque<Chunk>,
    /// Bytes in `chunks`, bookkeeping included.
    cost: usize,
    /// Offset of the next byte, counted from the process's start.
    end: u64,
    /// Everything before this offset has been given to some client.
    delivered: u64,
    /// Offset of the next byte for each attached reader.
    readers: HashMap<u64, u64>,
    next_reader: u64,
    /// The reader the log waits for, where it stands, and since when.
    waiting_for: Option<(u64, u64, Instant)>,
    result: Option<EndEvent>,
}

#[derive(Debug)]
struct Chunk {
    start: u64,
    stream: Stream,
    data: Vec<u8>,
}

impl Chunk {
    fn end(&self) -> u64 {
        self.start + self.data.len() as u64
    }
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Appends output (at most [`MAX_CHUNK`] bytes), waiting for room as the policy says.
    pub async fn append(&self, stream: Stream, data: &[u8]) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if self.lock().try_append(stream, data, Instant::now()) {
                break;
            }
            // The timeout is for the stall limit; readers that move or leave notify.
            let _ = tokio::time::timeout(STALL_LIMIT, changed).await;
        }
        self.changed.notify_waiters();
    }

    /// Records the end. Output appended later is ignored.
    pub fn finish(&self, result: EndEvent) {
        self.lock().result.get_or_insert(result);
        self.changed.notify_waiters();
    }

    /// Drops retained output, keeping the result.
    pub fn clear(&self) {
        let mut log = self.lock();
        log.chunks = VecDeque::new();
        log.cost = 0;
    }

    /// Bytes held.
    pub fn cost(&self) -> usize {
        self.lock().cost
    }

    /// Attaches a reader.
    pub fn subscribe(self: &Arc<Self>) -> Subscription {
        let mut log = self.lock();
        let cursor = match (&log.result, log.readers.is_empty()) {
            (Some(_), _) => 0,
            (None, true) => log.delivered,
            (None, false) => log.end,
        };
        let id = log.next_reader;
        log.next_reader += 1;
        log.readers.insert(id, cursor);
        Subscription { output: self.clone(), id }
    }
}

impl Log {
    /// Appends unless that would drop bytes an attached reader still needs.
    fn try_append(&mut self, stream: Stream, data: &[u8], now: Instant) -> bool {
        if self.result.is_some() {
            return true;
        }
        while self.cost + data.len() + CHUNK_OVERHEAD > CAPACITY {
            let Some(front) = self.chunks.front() else { break };
            let needed_until = front.end();
            if let Some((&laggard, &cursor)) = self.readers.iter().min_by_key(|(_, &cursor)| cursor) {
                if cursor < needed_until && !self.cut_off(laggard, cursor, now) {
                    return false;
                }
            }
            if let Some(dropped) = self.chunks.pop_front() {
                self.cost -= dropped.data.len() + CHUNK_OVERHEAD;
            }
        }
        self.waiting_for = None;
        self.push(stream, data);
        true
    }

    /// Removes the laggard if it has stalled too long at the expense of others.
    fn cut_off(&mut self, laggard: u64, cursor: u64, now: Instant) -> bool {
        let since = match self.waiting_for {
            Some((id, at, since)) if (id, at) == (laggard, cursor) => since,
            _ => {
                self.waiting_for = Some((laggard, cursor, now));
                now
            }
        };
        let others_wait = self.readers.values().any(|&other| other == self.end);
        let cut = others_wait && now.duration_since(since) >= STALL_LIMIT;
        if cut {
            self.readers.remove(&laggard);
        }
        cut
    }

    fn push(&mut self, stream: Stream, data: &[u8]) {
        match self.chunks.back_mut() {
            Some(last) if last.stream == stream && last.data.len() + data.len() <= MAX_CHUNK => {
                last.data.extend_from_slice(data);
                self.cost += data.len();
            }
            _ => {
                self.chunks.push_back(Chunk { start: self.end, stream, data: data.to_vec() });
                self.cost += data.len() + CHUNK_OVERHEAD;
            }
        }
        self.end += data.len() as u64;
    }

    /// What `reader` has been given so far has reached its client.
    fn confirm(&mut self, reader: u64) {
        if let Some(&cursor) = self.readers.get(&reader) {
            self.delivered = self.delivered.max(cursor);
        }
    }

    /// The next item for `reader`, if there is one.
    fn read(&mut self, reader: u64) -> Option<Item> {
        let Some(&cursor) = self.readers.get(&reader) else { return Some(Item::CutOff) };
        let index = self.chunks.partition_point(|chunk| chunk.end() <= cursor);
        let Some(chunk) = self.chunks.get(index) else { return self.result.clone().map(Item::End) };
        let from = usize::try_from(cursor.saturating_sub(chunk.start)).unwrap_or(0);
        let item = Item::Data(chunk.stream, Bytes::copy_from_slice(&chunk.data[from..]));
        let after = chunk.end();
        self.readers.insert(reader, after);
        Some(item)
    }
}

/// A reader's place in the log; dropping it detaches the reader.
#[derive(Debug)]
pub struct Subscription {
    output: Arc<Output>,
    id: u64,
}

impl Subscription {
    /// Waits for the next item. Asking for it confirms that the one before has been passed on: what a reader that goes away was
    /// still holding is given to the next one.
    pub async fn next(&self) -> Item {
        self.output.lock().confirm(self.id);
        loop {
            let mut changed = std::pin::pin!(self.output.changed.notified());
            changed.as_mut().enable();
            let item = self.output.lock().read(self.id);
            if let Some(item) = item {
                self.output.changed.notify_waiters();
                return item;
            }
            changed.await;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.output.lock().readers.remove(&self.id);
        self.output.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reaper::ExitStatus;

    fn end() -> EndEvent {
        EndEvent::from(ExitStatus::Exited(0))
    }

    async fn read_all(subscription: &Subscription) -> (Vec<u8>, Item) {
        let mut bytes = Vec::new();
        loop {
            match subscription.next().await {
                Item::Data(_, data) => bytes.extend_from_slice(&data),
                last => return (bytes, last),
            }
        }
    }

    #[tokio::test]
    async fn a_reader_gets_everything_in_order_and_the_end() {
        let output = Arc::new(Output::default());
        let reader = output.subscribe();
        output.append(Stream::Stdout, b"ab").await;
        output.append(Stream::Stderr, b"c").await;
        output.append(Stream::Stdout, b"d").await;
        assert_eq!(reader.next().await, Item::Data(Stream::Stdout, Bytes::from_static(b"ab")));
        assert_eq!(reader.next().await, Item::Data(Stream::Stderr, Bytes::from_static(b"c")));
        output.finish(end());
        assert_eq!(read_all(&reader).await, (b"d".to_vec(), Item::End(end())));
    }

    #[tokio::test]
    async fn without_readers_the_newest_output_is_kept() {
        let output = Arc::new(Output::default());
        for i in 0..100_u8 {
            output.append(Stream::Stdout, &[i; MAX_CHUNK]).await;
        }
        assert!(output.cost() <= CAPACITY);
        output.finish(end());
        let (bytes, _) = read_all(&output.subscribe()).await;
        assert_eq!((bytes.first(), bytes.last(), bytes.len()), (Some(&93), Some(&99), 7 * MAX_CHUNK));
    }

    #[tokio::test]
    async fn tiny_alternating_chunks_are_bounded() {
        let output = Arc::new(Output::default());
        for _ in 0..20_000 {
            output.append(Stream::Stdout, b"a").await;
            output.append(Stream::Stderr, b"b").await;
        }
        assert!(output.cost() <= CAPACITY && output.lock().chunks.len() < 5_000);
    }

    #[tokio::test]
    async fn a_later_reader_continues_where_the_last_one_left() {
        let output = Arc::new(Output::default());
        let first = output.subscribe();
        output.append(Stream::Stdout, b"seen").await;
        first.next().await;
        output.append(Stream::Stdout, b"un").await;
        // Given, but not confirmed by asking for more.
        first.next().await;
        drop(first);
        output.append(Stream::Stderr, b"seen").await;
        let second = output.subscribe();
        let beside = output.subscribe();
        output.append(Stream::Stdout, b"live").await;
        output.finish(end());
        assert_eq!(read_all(&second).await.0, b"unseenlive");
        assert_eq!(read_all(&beside).await.0, b"live");
        assert_eq!(read_all(&output.subscribe()).await.0, b"seenunseenlive");
    }

    #[tokio::test(start_paused = true)]
    async fn a_single_slow_reader_loses_nothing() {
        let output = Arc::new(Output::default());
        let reader = output.subscribe();
        let writer = {
            let output = output.clone();
            tokio::spawn(async move {
                for i in 0..64_u8 {
                    output.append(Stream::Stdout, &[i; MAX_CHUNK]).await;
                }
                output.finish(end());
            })
        };
        tokio::time::sleep(STALL_LIMIT * 10).await;
        assert!(!writer.is_finished() && output.cost() <= CAPACITY);
        let (bytes, last) = read_all(&reader).await;
        assert_eq!((bytes.len(), last), (64 * MAX_CHUNK, Item::End(end())));
    }

    #[tokio::test(start_paused = true)]
    async fn a_stalled_reader_is_cut_off_for_the_sake_of_others() {
        let output = Arc::new(Output::default());
        let (stalled, live) = (output.subscribe(), output.subscribe());
        let reading = tokio::spawn(async move { read_all(&live).await.0.len() });
        for i in 0..64_u8 {
            output.append(Stream::Stdout, &[i; MAX_CHUNK]).await;
        }
        output.finish(end());
        assert_eq!(reading.await.expect("reader"), 64 * MAX_CHUNK);
        assert_eq!(stalled.next().await, Item::CutOff);
    }
}
