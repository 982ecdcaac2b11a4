//! Threads for requests, as many as wait for something.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most workers at once.
const MAX_WORKERS: usize = 256;
/// How long a worker waits for more before it ends.
const LINGER: Duration = Duration::from_secs(2);
/// Stack of a worker.
const STACK: usize = 256 << 10;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    workers: usize,
    idle: usize,
}

/// A pool of workers.
#[derive(Default)]
pub struct Pool {
    state: Mutex<State>,
    arrived: Condvar,
}

impl Pool {
    /// Runs a job, on a thread that waits for one or a new one. With the most workers there may be, it waits its turn.
    pub fn run(self: &Arc<Self>, job: Job) {
        let mut state = self.state();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() {
            self.arrived.notify_one();
        } else if state.workers < MAX_WORKERS {
            let pool = self.clone();
            let started = std::thread::Builder::new().name("ublk".into()).stack_size(STACK).spawn(move || pool.work());
            match started {
                Ok(_) => state.workers += 1,
                // The others will come to it. The first worker is started with the pool.
                Err(error) => tracing::warn!(%error, workers = state.workers, "no further ublk worker can be started"),
            }
        }
    }

    fn work(&self) {
        let mut state = self.state();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.state();
                continue;
            }
            state.idle += 1;
            let (next, waited) = self.arrived.wait_timeout(state, LINGER).unwrap_or_else(PoisonError::into_inner);
            state = next;
            state.idle -= 1;
            // One stays, so that there is somebody even if no thread can be started any more.
            if waited.timed_out() && state.jobs.is_empty() && state.workers > 1 {
                state.workers -= 1;
                return;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn jobs_that_wait_do_not_hold_up_others() {
        let pool = Arc::new(Pool::default());
        let (go, gate) = mpsc::channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (done, results) = mpsc::channel();
        for n in 0..20 {
            let (gate, done) = (gate.clone(), done.clone());
            pool.run(Box::new(move || {
                if n < 10 {
                    // Ten wait for each other's lock and for the gate.
                    let _ = gate.lock().expect("no panic").recv();
                }
                let _ = done.send(n);
            }));
        }
        let first: Vec<i32> = results.iter().take(10).collect();
        assert!(first.iter().all(|n| *n >= 10), "{first:?}");
        drop(go);
        assert_eq!(results.iter().take(10).count(), 10);
    }
}
