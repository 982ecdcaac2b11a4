//! A remote layer, read through the cache.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use overlaybd::{ByteSource, Digest, FileSource};

use super::fetch::Fetcher;
use super::files::Found;
use super::flight::Claim;
use super::layout::BLOCK;
use super::readahead::ReadAhead;
use super::stats::count;
use crate::origin::{Headers, Lane};

/// Rounds a reader makes for one block before it gives up. More than one only if the block is evicted, damaged or given up
/// by another reader's origin at just the wrong moment.
const ROUNDS: u32 = 8;

/// A layer behind a URL. A [`ByteSource`]: any thread may read; a read blocks while its bytes are fetched, at most for the
/// origin's time budget.
pub struct CachedLayer {
    pub(super) fetcher: Fetcher,
    readahead: ReadAhead,
    /// The assembled layer, once there is one.
    pub(super) local: OnceLock<FileSource>,
    /// Where to assemble it.
    pub(super) path: Option<PathBuf>,
    pub(super) digest: Option<Digest>,
}

impl CachedLayer {
    pub(super) fn new(fetcher: Fetcher, path: Option<PathBuf>, digest: Option<Digest>) -> Self {
        Self { fetcher, readahead: ReadAhead::new(), local: OnceLock::new(), path, digest }
    }

    /// The URL, as given.
    pub fn url(&self) -> &str {
        self.fetcher.origin.url()
    }

    /// The URL as logs may show it.
    pub(super) fn shown(&self) -> &str {
        self.fetcher.origin.shown()
    }

    /// Where the layer is assembled when it is complete.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Whether the layer is read from its own local file.
    pub fn is_local(&self) -> bool {
        self.local.get().is_some()
    }

    /// Whether all bytes were compared with the digest.
    pub fn is_verified(&self) -> bool {
        self.fetcher.layer.is_verified()
    }

    /// Blocks stored in the cache, and blocks in all.
    pub fn progress(&self) -> (u32, u32) {
        (self.fetcher.layer.present(), self.fetcher.layer.count())
    }

    /// Replaces the headers of later requests.
    pub fn set_headers(&self, headers: Headers) {
        self.fetcher.origin.set_headers(headers);
    }

    /// Reads through the cache; `lane` says who waits.
    pub(super) fn read(&self, mut buf: &mut [u8], mut offset: u64, lane: Lane) -> io::Result<()> {
        let end = offset.checked_add(buf.len() as u64).filter(|end| *end <= self.fetcher.layer.size);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let last = end.div_ceil(BLOCK) as u32;
        while !buf.is_empty() {
            let at = (offset % BLOCK) as usize;
            let take = buf.len().min(BLOCK as usize - at);
            let (now, later) = buf.split_at_mut(take);
            self.read_block((offset / BLOCK) as u32, at, now, last, lane)?;
            buf = later;
            offset += take as u64;
        }
        Ok(())
    }

    /// Reads from one block. The reader goes on up to block `end`, so those before it are fetched in the same request.
    fn read_block(&self, block: u32, at: usize, buf: &mut [u8], end: u32, lane: Lane) -> io::Result<()> {
        let Fetcher { shared, layer, files, .. } = &self.fetcher;
        let ahead = self.readahead.note(block);
        let mut found_bad = false;
        for _ in 0..ROUNDS {
            if let Some(why) = layer.poison() {
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{}: {why}", self.fetcher.origin.shown()),
                ));
            }
            if let Some(files) = files.as_ref().filter(|_| layer.touch(block)) {
                match files.read(block, at, buf) {
                    Ok(Found::Good) => {
                        count(&shared.counters.hits);
                        if let Some(range) = ahead {
                            let fetcher = self.fetcher.clone();
                            shared.runtime.spawn(async move { fetcher.background(range).await });
                        }
                        return Ok(());
                    }
                    // Evicted and fetched again while it was read, perhaps: look twice.
                    Ok(Found::Bad) if !found_bad => {
                        found_bad = true;
                        continue;
                    }
                    Ok(Found::Bad) => shared.drop_damaged(layer, block),
                    Err(error) => {
                        tracing::warn!(%error, block, "reading a cached block failed");
                        shared.drop_damaged(layer, block);
                    }
                }
            }
            let (flight, mine) = match layer.flights.claim(block, || layer.is_present(block)) {
                Claim::Present => continue,
                Claim::Joined(flight) => (flight, false),
                Claim::Mine(flight) => {
                    let end = ahead.as_ref().map_or(end, |ahead| ahead.end.max(end));
                    self.fetcher.demand(block, flight.clone(), end, lane);
                    (flight, true)
                }
            };
            count(if mine { &shared.counters.misses } else { &shared.counters.joined });
            match flight.wait() {
                Ok(fetched) => {
                    buf.copy_from_slice(&fetched.bytes[at..at + buf.len()]);
                    return Ok(());
                }
                Err(error) if mine => return Err(error.into()),
                // Another reader's origin, or the far end of another reader's request: try with our own.
                Err(_) => {}
            }
        }
        Err(io::Error::other(format!(
            "{}: block {block} was lost {ROUNDS} times in a row",
            self.fetcher.origin.shown()
        )))
    }
}

impl ByteSource for CachedLayer {
    fn size(&self) -> u64 {
        self.fetcher.layer.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        match self.local.get() {
            Some(local) => local.read_exact_at(buf, offset),
            None => self.read(buf, offset, Lane::Demand),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        if let Some(local) = self.local.get() {
            return local.prefetch(offset, len);
        }
        let end = offset.saturating_add(len).min(self.fetcher.layer.size);
        // Both are within the layer, whose blocks fit 32 bits.
        let blocks = (offset / BLOCK) as u32..end.div_ceil(BLOCK) as u32;
        if offset >= end {
            return Ok(());
        }
        let fetcher = self.fetcher.clone();
        self.fetcher.shared.wait(async move { fetcher.background(blocks).await })?;
        Ok(())
    }

    fn as_file(&self) -> Option<&File> {
        self.local.get().and_then(ByteSource::as_file)
    }
}

impl Drop for CachedLayer {
    fn drop(&mut self) {
        let Fetcher { shared, layer, .. } = &self.fetcher;
        if !layer.key.is_kept() {
            shared.poison(layer, "closed".to_owned());
        }
    }
}
