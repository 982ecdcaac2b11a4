//! Watchers of clients that poll.
//!
//! Events of a watcher wait until they are fetched, at most [`MAX_EVENTS`]. When more happen, all that wait are dropped and the
//! next fetch says so with `data_loss`; the one after it continues with what happened since. Silently skipping some would let
//! a client believe that it knows the state of the directory.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

use super::wire::FilesystemEvent;
use super::Watch;
use crate::error::{Code, RpcError};

/// Most events that wait for one client: as many as the kernel keeps by default.
const MAX_EVENTS: usize = 16_384;
/// Most watchers; the kernel allows 128 inotify instances by default, and streams need some.
const MAX_WATCHERS: usize = 100;

/// The watchers of a sandbox.
#[derive(Debug, Default)]
pub struct Registry {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    watchers: HashMap<String, Watcher>,
    last: u64,
}

#[derive(Debug)]
struct Watcher {
    queue: Arc<Mutex<Queue>>,
    reader: AbortHandle,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

#[derive(Debug, Default)]
struct Queue {
    events: Vec<FilesystemEvent>,
    /// What the next fetch fails with.
    lost: Option<String>,
    /// Whether nothing will come any more.
    ended: bool,
}

impl Queue {
    fn add(&mut self, events: Vec<FilesystemEvent>) {
        if self.events.len() + events.len() > MAX_EVENTS {
            self.events = Vec::new();
            self.lost = Some(format!("more than {MAX_EVENTS} events were not fetched in time and are lost"));
        } else if self.lost.is_none() {
            self.events.extend(events);
        }
    }

    fn take(&mut self) -> Result<Vec<FilesystemEvent>, RpcError> {
        let lost = if self.ended { self.lost.clone() } else { self.lost.take() };
        match lost {
            Some(message) => Err(RpcError { code: Code::DataLoss, message }),
            None => Ok(std::mem::take(&mut self.events)),
        }
    }
}

impl Registry {
    /// Keeps a watch and collects its events; returns its id.
    ///
    /// # Errors
    /// `resource_exhausted` when there are too many.
    pub fn add(&self, mut watch: Watch) -> Result<String, RpcError> {
        let mut inner = lock(&self.inner);
        if inner.watchers.len() >= MAX_WATCHERS {
            let message = format!("there are {MAX_WATCHERS} watchers already; remove one");
            return Err(RpcError::resource_exhausted(message));
        }
        let queue = Arc::new(Mutex::new(Queue::default()));
        let filled = queue.clone();
        let reader = tokio::spawn(async move {
            loop {
                match watch.next().await {
                    Ok(events) => lock(&filled).add(events),
                    Err(error) => {
                        let mut queue = lock(&filled);
                        (queue.lost, queue.ended) = (Some(error.message), true);
                        return;
                    }
                }
            }
        });
        inner.last += 1;
        let id = format!("w{}", inner.last);
        inner.watchers.insert(id.clone(), Watcher { queue, reader: reader.abort_handle() });
        Ok(id)
    }

    /// What happened since the call before.
    ///
    /// # Errors
    /// `not_found`; `data_loss` when events were lost.
    pub fn events(&self, id: &str) -> Result<Vec<FilesystemEvent>, RpcError> {
        let inner = lock(&self.inner);
        let watcher = inner.watchers.get(id).ok_or_else(|| unknown(id))?;
        let events = lock(&watcher.queue).take();
        events
    }

    /// Ends a watcher.
    ///
    /// # Errors
    /// `not_found`.
    pub fn remove(&self, id: &str) -> Result<(), RpcError> {
        lock(&self.inner).watchers.remove(id).map(drop).ok_or_else(|| unknown(id))
    }
}

/// No code panics while it holds one of these locks.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn unknown(id: &str) -> RpcError {
    RpcError::not_found(format!("watcher '{id}' does not exist"))
}

#[cfg(test)]
mod tests {
    use super::super::wire::EventType;
    use super::*;

    fn events(count: usize) -> Vec<FilesystemEvent> {
        vec![FilesystemEvent { name: "f".into(), r#type: EventType::Write, entry: None }; count]
    }

    #[test]
    fn too_many_events_are_reported_as_lost_once() {
        let mut queue = Queue::default();
        queue.add(events(MAX_EVENTS));
        assert_eq!(queue.take().unwrap().len(), MAX_EVENTS);
        queue.add(events(MAX_EVENTS));
        queue.add(events(1));
        queue.add(events(1));
        assert_eq!(queue.take().unwrap_err().code, Code::DataLoss);
        assert_eq!(queue.take().unwrap().len(), 0);
        queue.add(events(2));
        assert_eq!(queue.take().unwrap().len(), 2);
    }
}
