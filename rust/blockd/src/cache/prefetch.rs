//! Fetching a working set in bulk.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use overlaybd::ByteSource;
use rustix::fs::{fadvise, Advice};
use serde::Serialize;
use tokio::task::JoinSet;

use super::fetch::MAX_RUN;
use super::layer::CachedLayer;
use super::layout::BLOCK;
use super::working_set::{LayerId, Touch, WorkingSet};
use super::{Cache, LayerSource};

/// Touches are sorted and merged within so many blocks (64 MiB), so that the order still counts on the large scale.
const WINDOW: u64 = 256;
/// Range requests at once, over all layers; each origin has its own, lower bound.
const PARALLEL: usize = 8;

/// What a prefetch did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct PrefetchReport {
    /// Blocks in the working set.
    pub wanted: u64,
    /// Blocks fetched.
    pub fetched: u64,
    /// Blocks of layers that are not in this stack (any more).
    pub unknown: u64,
    /// Whether the rest was left out because it would fill most of the cache.
    pub truncated: bool,
    /// The first failure of each origin that failed; the rest of its layers was left out.
    pub errors: Vec<String>,
}

impl Cache {
    /// Fetches the blocks of `set` that are not there, and asks the kernel to read ahead those of local layers. `layers` is
    /// the stack as it is now; layers are found by their identity, so a stack may have grown or been compacted meanwhile.
    /// Blocks the caller until all is there.
    pub fn prefetch(&self, set: &WorkingSet, layers: &[(LayerId, LayerSource)]) -> PrefetchReport {
        let by_id: HashMap<LayerId, LayerSource> = layers.iter().cloned().collect();
        let found: Vec<_> = set.layers.iter().map(|id| by_id.get(id).cloned()).collect();
        let limit = self.shared.limit / BLOCK * 3 / 4;
        let touches = set.touches.clone();
        self.wait(run(touches, found, limit))
    }
}

async fn run(touches: Vec<Touch>, layers: Vec<Option<LayerSource>>, limit: u64) -> PrefetchReport {
    let mut report = PrefetchReport { wanted: touches.iter().map(|t| u64::from(t.count)).sum(), ..Default::default() };
    let mut failed = vec![false; layers.len()];
    let mut tasks: JoinSet<(u8, Result<u32, String>)> = JoinSet::new();
    let mut planned = 0;
    for window in windows(touches) {
        for (index, range) in merge(window) {
            let count = u64::from(range.end - range.start);
            match layers.get(usize::from(index)) {
                Some(Some(LayerSource::Cached(layer))) if !layer.is_local() => {
                    while tasks.len() >= PARALLEL {
                        settle(tasks.join_next().await, &mut report, &mut failed);
                    }
                    if failed.get(usize::from(index)).copied().unwrap_or(true) {
                        continue;
                    }
                    planned += count;
                    if planned > limit {
                        report.truncated = true;
                        break;
                    }
                    tasks.spawn(fetch(index, layer.clone(), range));
                }
                Some(Some(source)) => will_need(source, range),
                _ => report.unknown += count,
            }
        }
        if report.truncated {
            break;
        }
    }
    while let Some(done) = tasks.join_next().await {
        settle(Some(done), &mut report, &mut failed);
    }
    report
}

type Done = Result<(u8, Result<u32, String>), tokio::task::JoinError>;

fn settle(done: Option<Done>, report: &mut PrefetchReport, failed: &mut [bool]) {
    match done {
        Some(Ok((_, Ok(fetched)))) => report.fetched += u64::from(fetched),
        Some(Ok((layer, Err(error)))) => {
            if let Some(failed) = failed.get_mut(usize::from(layer)).filter(|failed| !**failed) {
                *failed = true;
                report.errors.push(error);
            }
        }
        Some(Err(error)) => report.errors.push(error.to_string()),
        None => {}
    }
}

async fn fetch(index: u8, layer: Arc<CachedLayer>, range: Range<u32>) -> (u8, Result<u32, String>) {
    (index, layer.fetcher.background(range).await.map_err(|error| error.to_string()))
}

fn will_need(source: &LayerSource, range: Range<u32>) {
    if let Some(file) = source.as_file() {
        let len = std::num::NonZeroU64::new(u64::from(range.end - range.start) * BLOCK);
        // Advice only: nothing depends on it.
        let _ = fadvise(file, u64::from(range.start) * BLOCK, len, Advice::WillNeed);
    }
}

/// Cuts the touches into pieces of [`WINDOW`] blocks.
fn windows(touches: Vec<Touch>) -> Vec<Vec<Touch>> {
    let mut windows = vec![Vec::new()];
    let mut blocks = 0;
    for touch in touches {
        if blocks + u64::from(touch.count) > WINDOW && blocks > 0 {
            windows.push(Vec::new());
            blocks = 0;
        }
        blocks += u64::from(touch.count);
        if let Some(window) = windows.last_mut() {
            window.push(touch);
        }
    }
    windows
}

/// The blocks of some touches as ranges of at most [`MAX_RUN`], neighbours merged.
fn merge(mut touches: Vec<Touch>) -> Vec<(u8, Range<u32>)> {
    touches.sort_by_key(|touch| (touch.layer, touch.first));
    let mut merged: Vec<(u8, Range<u32>)> = Vec::new();
    for Touch { layer, first, count } in touches {
        let end = first + u32::from(count);
        match merged.last_mut() {
            Some((last, range)) if *last == layer && first <= range.end => range.end = range.end.max(end),
            _ => merged.push((layer, first..end)),
        }
    }
    let cut = |(layer, range): (u8, Range<u32>)| {
        range.clone().step_by(MAX_RUN as usize).map(move |at| (layer, at..(at + MAX_RUN).min(range.end)))
    };
    merged.into_iter().flat_map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_large_ranges() {
        let touch = |layer, first, count| Touch { layer, first, count };
        let touches =
            vec![touch(0, 5, 1), touch(1, 0, 2), touch(0, 4, 1), touch(0, 6, 20), touch(0, 6, 1), touch(1, 3, 1)];
        assert_eq!(merge(touches), [(0, 4..20), (0, 20..26), (1, 0..2), (1, 3..4)]);
    }

    #[test]
    fn the_order_of_windows_is_kept() {
        let touches: Vec<_> = (0..3).map(|n| Touch { layer: 0, first: 1000 - n * 300, count: 200 }).collect();
        let firsts: Vec<_> = windows(touches).iter().map(|window| window[0].first).collect();
        assert_eq!(firsts, [1000, 700, 400]);
    }
}
