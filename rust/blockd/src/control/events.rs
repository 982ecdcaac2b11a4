//! Telling clients what they did not ask for.

use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use tokio::sync::mpsc::{error::TrySendError, Sender};

/// The connections that want events.
#[derive(Default)]
pub struct Events(Mutex<Vec<Sender<Value>>>);

impl Events {
    /// Adds a connection, by what takes its outgoing lines.
    pub fn subscribe(&self, connection: Sender<Value>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
    }

    /// Sends an event to every subscriber that keeps up; gives how many there were.
    pub fn emit(&self, event: &Value) -> usize {
        let mut subscribers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sent = 0;
        subscribers.retain(|connection| match connection.try_send(event.clone()) {
            Ok(()) => {
                sent += 1;
                true
            }
            Err(TrySendError::Full(_)) => true,
            Err(TrySendError::Closed(_)) => false,
        });
        sent
    }
}
