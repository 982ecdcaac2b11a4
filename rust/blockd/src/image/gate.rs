//! How many reads of one image may run at once.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Reads of one image that may run at once. More would let an image whose origin stalls hold every worker.
const MAX_RUNNING: usize = 16;

/// A read that has been asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitingRead {
    /// The request to answer.
    pub unique: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes wanted.
    pub size: u32,
}

/// Whether a read may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// At once; [`Gate::leave`] must follow.
    Now,
    /// Later, by whoever leaves.
    Later,
}

#[derive(Default)]
struct State {
    running: usize,
    waiting: VecDeque<WaitingRead>,
}

/// Limits how many reads run at once; the others wait without holding a thread.
#[derive(Default)]
pub struct Gate(Mutex<State>);

impl Gate {
    /// Asks to run a read, or leaves it to wait.
    pub fn enter(&self, read: WaitingRead) -> Turn {
        let mut state = self.state();
        if state.running < MAX_RUNNING {
            state.running += 1;
            return Turn::Now;
        }
        state.waiting.push_back(read);
        Turn::Later
    }

    /// Ends a read, and gives one that waited to the caller, who must run it and leave again.
    pub fn leave(&self) -> Option<WaitingRead> {
        let mut state = self.state();
        let next = state.waiting.pop_front();
        if next.is_none() {
            state.running -= 1;
        }
        next
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_read_runs_once_and_few_at_a_time() {
        let gate = Gate::default();
        let read = |unique| WaitingRead { unique, offset: 0, size: 1 };
        let now = (0..40).filter(|unique| gate.enter(read(*unique)) == Turn::Now).count();
        assert_eq!(now, MAX_RUNNING);
        let later: Vec<u64> = std::iter::from_fn(|| gate.leave()).map(|read| read.unique).collect();
        assert_eq!(later, (16..40).collect::<Vec<_>>());
        // That was one runner's turn; the others leave and all places are free again.
        (1..MAX_RUNNING).for_each(|_| assert_eq!(gate.leave(), None));
        assert_eq!((0..40).filter(|unique| gate.enter(read(*unique)) == Turn::Now).count(), MAX_RUNNING);
    }
}
