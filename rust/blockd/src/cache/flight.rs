//! One fetch per block, however many ask.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tokio::sync::OwnedSemaphorePermit;

use crate::origin::SharedError;

/// A fetched block in memory. The permit bounds how many there are; it goes back when the last reader has copied what it
/// needs and the block is stored.
pub(super) struct Fetched {
    pub(super) bytes: Box<[u8]>,
    pub(super) _permit: OwnedSemaphorePermit,
}

type Outcome = Result<Arc<Fetched>, SharedError>;

/// A block on its way.
#[derive(Default)]
pub(super) struct Flight {
    outcome: Mutex<Option<Outcome>>,
    landed: Condvar,
}

impl Flight {
    /// Waits for the block. Every fetch ends within the origin's time budget, so this wait does.
    pub(super) fn wait(&self) -> Outcome {
        let mut outcome = lock(&self.outcome);
        loop {
            match &*outcome {
                Some(outcome) => return outcome.clone(),
                None => outcome = self.landed.wait(outcome).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Ends the wait; later calls change nothing.
    pub(super) fn land(&self, outcome: Outcome) {
        lock(&self.outcome).get_or_insert(outcome);
        self.landed.notify_all();
    }
}

/// The blocks of one layer that are on their way.
#[derive(Default)]
pub(super) struct Flights(Mutex<HashMap<u32, Arc<Flight>>>);

/// What is known of a block that somebody wants.
pub(super) enum Claim {
    /// It is stored.
    Present,
    /// Somebody else fetches it.
    Joined(Arc<Flight>),
    /// The caller must fetch it.
    Mine(Arc<Flight>),
}

impl Flights {
    /// Claims a block. `present` is asked with the claims locked, so that a block which was just stored and left the claims
    /// is seen as stored.
    pub(super) fn claim(&self, block: u32, present: impl FnOnce() -> bool) -> Claim {
        let mut flights = lock(&self.0);
        if let Some(flight) = flights.get(&block) {
            return Claim::Joined(flight.clone());
        }
        if present() {
            return Claim::Present;
        }
        let flight = Arc::<Flight>::default();
        flights.insert(block, flight.clone());
        Claim::Mine(flight)
    }

    /// The block is stored or given up.
    pub(super) fn done(&self, block: u32) {
        lock(&self.0).remove(&block);
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.0).is_empty()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
