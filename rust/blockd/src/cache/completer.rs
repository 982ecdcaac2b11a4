//! Making layers whole in the background: one at a time, behind everybody who waits, and only as long as somebody has them open.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::complete::CompleteError;
use super::layer::CachedLayer;

/// After a failure a layer is tried again so much later.
const RETRY: Duration = Duration::from_secs(60);
/// What the thread leaves to others of the processor (`nice`).
const NICE: i32 = 10;

/// The thread that completes layers, started when there is the first.
#[derive(Default)]
pub(super) struct Completer {
    queue: Arc<Queue>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    layers: Vec<(Instant, Weak<CachedLayer>)>,
    ended: bool,
}

impl Completer {
    /// Completes the layer sometime.
    pub(super) fn add(&self, layer: &Arc<CachedLayer>) {
        self.queue.add(layer, Instant::now());
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            let queue = self.queue.clone();
            match std::thread::Builder::new().name("complete".into()).spawn(move || work(&queue)) {
                Ok(started) => *thread = Some(started),
                // Layers are as readable as before; the next one tries again.
                Err(error) => tracing::warn!(%error, "no thread to complete layers"),
            }
        }
    }

    /// Ends the thread, which gives up what it is at.
    pub(super) fn end(&self) {
        self.queue.lock().ended = true;
        self.queue.changed.notify_all();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, layer: &Arc<CachedLayer>, due: Instant) {
        self.lock().layers.push((due, Arc::downgrade(layer)));
        self.changed.notify_all();
    }

    /// Waits for the next layer that is due and still open; none at the end.
    fn next(&self) -> Option<Arc<CachedLayer>> {
        let mut state = self.lock();
        while !state.ended {
            state.layers.retain(|(_, layer)| layer.strong_count() > 0);
            let first = state.layers.iter().enumerate().min_by_key(|(_, (due, _))| *due);
            let Some((index, due)) = first.map(|(index, (due, _))| (index, *due)) else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            match due.checked_duration_since(Instant::now()).filter(|wait| !wait.is_zero()) {
                Some(wait) => state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0,
                None => {
                    if let Some(layer) = state.layers.swap_remove(index).1.upgrade() {
                        return Some(layer);
                    }
                }
            }
        }
        None
    }
}

fn work(queue: &Queue) {
    // On Linux it is this thread's alone.
    let _ = rustix::process::nice(NICE);
    while let Some(layer) = queue.next() {
        // Ours is the last reference once every image of the layer is detached.
        let wanted = || Arc::strong_count(&layer) > 1 && !queue.lock().ended;
        match layer.complete_while(wanted) {
            Ok(_) => tracing::info!(layer = layer.shown(), path = ?layer.path(), "a layer is complete"),
            Err(CompleteError::Unwanted) => {}
            // Said already, and for good.
            Err(CompleteError::Digest { .. }) => {}
            Err(error) => {
                let cause = crate::Error::caused(crate::Code::Io, "completing a layer", &error).message;
                tracing::warn!(layer = layer.shown(), retry = ?RETRY, "{cause}");
                queue.add(&layer, Instant::now() + RETRY);
            }
        }
    }
}
