//! The processes clients have started: running ones, and for a while those that have ended.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use tokio::time::Instant;

use super::input::Input;
use super::output::Output;
use super::spawn::FileLimit;
use super::wire::{EndEvent, ProcessConfig, ProcessInfo, Selector};
use crate::error::RpcError;
use crate::memory;
use crate::reaper::Reaper;

/// How long a result can be asked for after the end. E2B keeps it for about 30 s.
pub const RETENTION: Duration = Duration::from_secs(60);

/// Bytes of output kept for ended processes altogether; beyond it the oldest ones keep only their result.
const RETAINED_OUTPUT: usize = 8 << 20;

/// Ended processes kept altogether.
const RETAINED_RESULTS: usize = 4096;

/// One process a client has started.
#[derive(Debug)]
pub struct Process {
    /// Process id, and the id of its process group and session.
    pub pid: u32,
    /// What was asked for.
    pub config: ProcessConfig,
    /// The client's own name for it.
    pub tag: Option<String>,
    /// Its stdin or terminal.
    pub input: Input,
    /// What it has printed.
    pub output: Arc<Output>,
    exited: AtomicBool,
}

impl Process {
    /// A running process.
    pub fn new(pid: u32, config: ProcessConfig, tag: Option<String>, input: Input) -> Self {
        Self { pid, config, tag, input, output: Arc::default(), exited: AtomicBool::new(false) }
    }

    /// Whether it has been reaped; its pid may belong to another process then.
    pub fn has_exited(&self) -> bool {
        self.exited.load(Ordering::Acquire)
    }

    /// Records that it has been reaped.
    pub fn set_exited(&self) {
        self.exited.store(true, Ordering::Release);
    }

    /// Sends a signal to the process and everything in its process group.
    ///
    /// # Errors
    /// Those of `kill(2)`.
    pub fn signal_group(&self, signal: Signal) -> nix::Result<()> {
        match i32::try_from(self.pid) {
            Ok(pid) if pid > 1 => kill(Pid::from_raw(-pid), signal),
            _ => Err(nix::errno::Errno::ESRCH),
        }
    }
}

/// See the module's description.
#[derive(Debug)]
pub struct Table {
    /// Delivers the ends.
    pub reaper: Arc<Reaper>,
    /// What every process gets.
    pub files: FileLimit,
    entries: Mutex<Entries>,
}

#[derive(Debug, Default)]
struct Entries {
    by_pid: HashMap<u32, Arc<Process>>,
    /// Those that have ended, oldest first. A pid that was reused is in `by_pid` with its newer process.
    ended: std::collections::VecDeque<(Instant, Arc<Process>)>,
}

impl Table {
    /// An empty table.
    pub fn new(reaper: Arc<Reaper>, files: FileLimit) -> Self {
        Self { reaper, files, entries: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a process that has just been started.
    pub fn insert(&self, process: Arc<Process>) {
        self.lock().by_pid.insert(process.pid, process);
    }

    /// Records a process's end for those who read its output now and those who ask within [`RETENTION`].
    pub fn finish(&self, process: &Arc<Process>, result: EndEvent) {
        process.output.finish(result);
        let mut entries = self.lock();
        entries.ended.push_back((Instant::now(), process.clone()));
        entries.evict(Instant::now());
    }

    /// Forgets results older than [`RETENTION`].
    pub fn evict(&self) {
        let mut entries = self.lock();
        entries.evict(Instant::now());
        if entries.by_pid.is_empty() {
            drop(entries);
            memory::give_back();
        }
    }

    /// The process a client means; with `ended`, also one whose result is still kept.
    ///
    /// # Errors
    /// `invalid_argument` when the selector is empty, `not_found` when there is no such process.
    pub fn find(&self, selector: &Selector, ended: bool) -> Result<Arc<Process>, RpcError> {
        let entries = self.lock();
        let wanted = |process: &&Arc<Process>| ended || !process.has_exited();
        match (selector.pid, &selector.tag) {
            (Some(pid), _) => entries
                .by_pid
                .get(&pid)
                .filter(wanted)
                .cloned()
                .ok_or_else(|| RpcError::not_found(format!("process with pid {pid} not found"))),
            (None, Some(tag)) => entries
                .by_pid
                .values()
                .filter(wanted)
                .filter(|process| process.tag.as_deref() == Some(tag))
                // A tag may be used again once its process has ended.
                .min_by_key(|process| process.has_exited())
                .cloned()
                .ok_or_else(|| RpcError::not_found(format!("process with tag '{tag}' not found"))),
            (None, None) => Err(RpcError::invalid_argument("field 'process' names neither a pid nor a tag")),
        }
    }

    /// The running processes, by pid.
    pub fn list(&self) -> Vec<ProcessInfo> {
        let mut processes: Vec<ProcessInfo> = self
            .lock()
            .by_pid
            .values()
            .filter(|process| !process.has_exited())
            .map(|process| ProcessInfo { config: process.config.clone(), pid: process.pid, tag: process.tag.clone() })
            .collect();
        processes.sort_by_key(|process| process.pid);
        processes
    }
}

impl Entries {
    fn evict(&mut self, now: Instant) {
        while let Some((at, oldest)) = self.ended.front() {
            if now.duration_since(*at) < RETENTION && self.ended.len() <= RETAINED_RESULTS {
                break;
            }
            if self.by_pid.get(&oldest.pid).is_some_and(|process| Arc::ptr_eq(process, oldest)) {
                self.by_pid.remove(&oldest.pid);
            }
            self.ended.pop_front();
        }
        let mut held = 0;
        for (_, process) in self.ended.iter().rev() {
            held += process.output.cost();
            if held > RETAINED_OUTPUT {
                process.output.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::output::Stream;
    use crate::reaper::ExitStatus;

    fn process(pid: u32, tag: Option<&str>) -> Arc<Process> {
        Arc::new(Process::new(pid, ProcessConfig::default(), tag.map(str::to_owned), Input::closed()))
    }

    fn by_pid(pid: u32) -> Selector {
        Selector { pid: Some(pid), tag: None }
    }

    fn end(table: &Table, process: &Arc<Process>) {
        process.set_exited();
        table.finish(process, EndEvent::from(ExitStatus::Exited(0)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_is_kept_for_a_while() {
        let table = Table::new(Arc::default(), None);
        let first = process(7, None);
        table.insert(first.clone());
        assert!(table.find(&by_pid(7), false).is_ok());
        end(&table, &first);
        assert!(table.find(&by_pid(7), false).is_err() && table.find(&by_pid(7), true).is_ok());
        assert!(table.list().is_empty());
        tokio::time::advance(RETENTION).await;
        table.evict();
        assert_eq!(table.find(&by_pid(7), true).expect_err("gone").message, "process with pid 7 not found");
    }

    #[tokio::test(start_paused = true)]
    async fn a_reused_pid_is_the_newer_process() {
        let table = Table::new(Arc::default(), None);
        let (old, new) = (process(7, Some("a")), process(7, Some("b")));
        table.insert(old.clone());
        end(&table, &old);
        table.insert(new.clone());
        tokio::time::advance(RETENTION).await;
        table.evict();
        assert!(Arc::ptr_eq(&table.find(&by_pid(7), false).expect("running"), &new));
    }

    #[tokio::test]
    async fn retained_output_is_bounded_and_the_newest_survives() {
        let table = Table::new(Arc::default(), None);
        let processes: Vec<_> = (2..102).map(|pid| process(pid, None)).collect();
        for process in &processes {
            table.insert(process.clone());
            for _ in 0..7 {
                process.output.append(Stream::Stdout, &[0; 32 << 10]).await;
            }
            end(&table, process);
        }
        let held: usize = processes.iter().map(|process| process.output.cost()).sum();
        assert!(held <= RETAINED_OUTPUT, "{held}");
        assert!(processes.last().expect("last").output.cost() > 0);
    }

    #[tokio::test]
    async fn tags_prefer_the_running_process() {
        let table = Table::new(Arc::default(), None);
        let (old, new) = (process(7, Some("t")), process(8, Some("t")));
        table.insert(old.clone());
        end(&table, &old);
        table.insert(new);
        let selector = Selector { pid: None, tag: Some("t".into()) };
        assert_eq!(table.find(&selector, true).expect("found").pid, 8);
        assert!(table.find(&Selector { pid: None, tag: None }, true).is_err());
    }
}
