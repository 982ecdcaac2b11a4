//! Fetching runs of blocks: one range request fills many blocks, each landing as soon as it is whole.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;

use super::files::Files;
use super::flight::{Claim, Fetched, Flight};
use super::layout::BLOCK;
use super::shared::Shared;
use super::state::LayerState;
use super::stats::count;
use crate::origin::{HttpOrigin, Lane, OriginError, SharedError, Sink};

/// Most blocks in one request (4 MiB): long enough that the round trip no longer matters, short enough that a reader who
/// joins at the end does not wait long.
pub(super) const MAX_RUN: u32 = 16;

/// What a fetch needs.
#[derive(Clone)]
pub(super) struct Fetcher {
    pub(super) shared: Arc<Shared>,
    pub(super) layer: Arc<LayerState>,
    pub(super) files: Option<Arc<Files>>,
    pub(super) origin: Arc<HttpOrigin>,
}

impl Fetcher {
    /// Fetches `first`, which the caller has claimed, and the blocks after it up to `end` that nobody has or fetches.
    pub(super) fn demand(&self, first: u32, flight: Arc<Flight>, end: u32, lane: Lane) {
        let mut run = vec![(first, flight)];
        self.extend(&mut run, end.min(first.saturating_add(MAX_RUN)));
        let filler = Filler::new(self.clone(), run, lane);
        self.shared.runtime.spawn(async move {
            let origin = filler.fetcher.origin.clone();
            let permit = origin.permit(lane).await;
            // Readers get an error through their flights.
            let _ = match permit {
                Ok(_permit) => filler.run().await.map(drop),
                Err(error) => Err(filler.fail(error)),
            };
        });
    }

    /// Fetches those blocks of `range` that are not there, if nobody else does. Claims late: what waits here for its turn
    /// holds up no reader.
    ///
    /// # Errors
    /// The origin failed.
    pub(super) async fn background(&self, range: Range<u32>) -> Result<u32, SharedError> {
        let mut at = range.start;
        let mut fetched = 0;
        while at < range.end {
            if self.layer.is_present(at) {
                at += 1;
                continue;
            }
            let permit = self.origin.permit(Lane::Background).await.map_err(|error| self.error(error))?;
            let mut run = Vec::new();
            self.extend_from(&mut run, at, range.end.min(at.saturating_add(MAX_RUN)));
            let Some((last, _)) = run.last() else {
                at += 1;
                continue;
            };
            at = last + 1;
            self.shared.counters.ahead.fetch_add(run.len() as u64, std::sync::atomic::Ordering::Relaxed);
            fetched += Filler::new(self.clone(), run, Lane::Background).run().await?;
            drop(permit);
        }
        Ok(fetched)
    }

    fn extend(&self, run: &mut Vec<(u32, Arc<Flight>)>, end: u32) {
        if let Some((last, _)) = run.last() {
            self.extend_from(run, last + 1, end);
        }
    }

    fn extend_from(&self, run: &mut Vec<(u32, Arc<Flight>)>, start: u32, end: u32) {
        for block in start..end.min(self.layer.count()) {
            match self.layer.flights.claim(block, || self.layer.is_present(block)) {
                Claim::Mine(flight) => run.push((block, flight)),
                Claim::Present | Claim::Joined(_) => break,
            }
        }
    }

    fn error(&self, error: OriginError) -> SharedError {
        SharedError { url: self.origin.shown().clone(), error: Arc::new(error) }
    }
}

/// Cuts what arrives into blocks. Whatever happens, every claimed block lands: with its bytes, or with an error when the
/// filler is dropped.
struct Filler {
    fetcher: Fetcher,
    lane: Lane,
    run: Range<u32>,
    claimed: HashMap<u32, Arc<Flight>>,
    position: u64,
    partial: Option<Partial>,
    whole: bool,
    filled: u32,
    error: Option<SharedError>,
}

struct Partial {
    block: u32,
    flight: Arc<Flight>,
    bytes: Box<[u8]>,
    permit: OwnedSemaphorePermit,
}

impl Filler {
    fn new(fetcher: Fetcher, run: Vec<(u32, Arc<Flight>)>, lane: Lane) -> Self {
        let start = run.first().map_or(0, |(block, _)| *block);
        let end = run.last().map_or(0, |(block, _)| block + 1);
        Self {
            fetcher,
            lane,
            run: start..end,
            claimed: run.into_iter().collect(),
            position: u64::from(start) * BLOCK,
            partial: None,
            whole: false,
            filled: 0,
            error: None,
        }
    }

    /// Fetches the run; returns the number of blocks filled.
    async fn run(mut self) -> Result<u32, SharedError> {
        let origin = self.fetcher.origin.clone();
        let size = self.fetcher.layer.size;
        let bytes = u64::from(self.run.start) * BLOCK..(u64::from(self.run.end) * BLOCK).min(size);
        match origin.stream(bytes, &mut self).await {
            Ok(()) => Ok(self.filled),
            Err(error) => Err(self.fail(error)),
        }
    }

    /// Gives all blocks up because of `error`.
    fn fail(mut self, error: OriginError) -> SharedError {
        let error = self.fetcher.error(error);
        self.error = Some(error.clone());
        error
    }

    /// Gets ready for a block, if it was claimed.
    async fn begin(&mut self, block: u32) -> Result<Option<Partial>, OriginError> {
        if !self.claimed.contains_key(&block) {
            return Ok(None);
        }
        let buffers = self.fetcher.shared.buffers(self.lane).clone();
        let permit = buffers.acquire_owned().await.map_err(|_| OriginError::Closed)?;
        // Not before: should the wait fail, the block must still land.
        let Some(flight) = self.claimed.remove(&block) else { return Ok(None) };
        let bytes = vec![0; Shared::len(&self.fetcher.layer, block)].into_boxed_slice();
        Ok(Some(Partial { block, flight, bytes, permit }))
    }

    /// Readers get the block at once; it is stored afterwards, and leaves the claims when it is.
    fn finish(&mut self, partial: Partial) {
        let Partial { block, flight, bytes, permit } = partial;
        let fetched = Arc::new(Fetched { bytes, _permit: permit });
        count(&self.fetcher.shared.counters.fetched);
        self.filled += 1;
        flight.land(Ok(fetched.clone()));
        let Fetcher { shared, layer, files, .. } = self.fetcher.clone();
        shared.clone().runtime.spawn_blocking(move || {
            match files {
                Some(files) => shared.store(&layer, &files, block, &fetched.bytes),
                None => count(&shared.counters.bypassed),
            }
            layer.flights.done(block);
        });
    }
}

impl Sink for Filler {
    fn position(&self) -> u64 {
        self.position
    }

    /// Takes everything: the origin would send it again for the next reader.
    fn rewind(&mut self) {
        if self.whole || self.position != u64::from(self.run.start) * BLOCK {
            return;
        }
        (self.whole, self.position) = (true, 0);
        let layer = &self.fetcher.layer;
        for block in (0..layer.count()).filter(|block| !self.run.contains(block)) {
            if let Claim::Mine(flight) = layer.flights.claim(block, || layer.is_present(block)) {
                self.claimed.insert(block, flight);
            }
        }
    }

    async fn write(&mut self, mut bytes: &[u8]) -> Result<(), OriginError> {
        while !bytes.is_empty() {
            let block = u32::try_from(self.position / BLOCK).map_err(|_| OriginError::Closed)?;
            let at = (self.position % BLOCK) as usize;
            let len = Shared::len(&self.fetcher.layer, block);
            let take = bytes.len().min(len - at);
            if at == 0 {
                self.partial = self.begin(block).await?;
            }
            if let Some(partial) = &mut self.partial {
                partial.bytes[at..at + take].copy_from_slice(&bytes[..take]);
            }
            self.position += take as u64;
            bytes = &bytes[take..];
            if at + take == len {
                if let Some(partial) = self.partial.take() {
                    self.finish(partial);
                }
            }
        }
        Ok(())
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        let error = self.error.take().unwrap_or_else(|| self.fetcher.error(OriginError::Closed));
        let partial = self.partial.take().map(|partial| (partial.block, partial.flight));
        for (block, flight) in self.claimed.drain().chain(partial) {
            // In this order: who meets the error and tries again must not meet it twice.
            self.fetcher.layer.flights.done(block);
            flight.land(Err(error.clone()));
        }
    }
}
