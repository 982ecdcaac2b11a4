//! Counting who has an image open.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
struct State {
    open: usize,
    closed: bool,
}

/// The open handles of one image.
#[derive(Default)]
pub struct Handles {
    state: Mutex<State>,
    released: Condvar,
}

impl Handles {
    /// Opens one more, unless the image is going away.
    pub fn acquire(&self) -> bool {
        let mut state = self.state();
        if !state.closed {
            state.open += 1;
        }
        !state.closed
    }

    /// Closes one.
    pub fn release(&self) {
        let mut state = self.state();
        state.open = state.open.saturating_sub(1);
        self.released.notify_all();
    }

    /// How many are open.
    pub fn open(&self) -> usize {
        self.state().open
    }

    /// Refuses new handles as soon as none is open, waiting for that as long as given: a process that was killed has
    /// not released its handles yet when its parent learns of the death. Gives the number still open if time is up.
    pub fn close(&self, patience: Duration) -> Result<(), usize> {
        let deadline = Instant::now() + patience;
        let mut state = self.state();
        while state.open > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(state.open);
            }
            state = self.released.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.closed = true;
        Ok(())
    }

    /// Takes handles again after a [`Handles::close`] that led to nothing.
    pub fn reopen(&self) {
        self.state().closed = false;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closes_when_the_last_is_released() {
        let handles = Handles::default();
        assert!(handles.acquire());
        assert_eq!(handles.close(Duration::ZERO), Err(1));
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| handles.close(Duration::from_secs(60)));
            handles.release();
            assert_eq!(closing.join().expect("no panic"), Ok(()));
        });
        assert!(!handles.acquire());
        handles.reopen();
        assert!(handles.acquire());
    }
}
