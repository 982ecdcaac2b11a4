//! Which images are attached.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::image::Attached;
use crate::{Code, Error};

/// First node number given out; 1 is the mount's root.
const FIRST_NODE: u64 = 2;

enum Slot {
    /// Being attached or detached.
    Reserved,
    Ready(Arc<Attached>),
}

struct State {
    names: HashMap<String, Slot>,
    nodes: BTreeMap<u64, Arc<Attached>>,
    /// Never goes back: the kernel may remember old numbers.
    next_node: u64,
}

/// All attached images, by name and by node number. Its lock is held for moments only, never while an image is opened.
pub struct Table(RwLock<State>);

impl Default for Table {
    fn default() -> Self {
        Self(RwLock::new(State { names: HashMap::new(), nodes: BTreeMap::new(), next_node: FIRST_NODE }))
    }
}

impl Table {
    /// Takes a name for an image that is about to be opened. It is free again when the reservation is dropped.
    ///
    /// # Errors
    /// [`Code::Exists`].
    pub fn reserve(self: &Arc<Self>, name: &str) -> Result<Reservation, Error> {
        let mut state = self.write();
        if state.names.contains_key(name) {
            return Err(Error::new(Code::Exists, format!("image {name} is attached already")));
        }
        state.names.insert(name.to_owned(), Slot::Reserved);
        let node = state.next_node;
        state.next_node += 1;
        Ok(Reservation { table: self.clone(), name: name.to_owned(), node, published: false })
    }

    /// The image of that name.
    pub fn get(&self, name: &str) -> Option<Arc<Attached>> {
        match self.read().names.get(name) {
            Some(Slot::Ready(image)) => Some(image.clone()),
            _ => None,
        }
    }

    /// The image of that name.
    ///
    /// # Errors
    /// [`Code::NotFound`]; [`Code::Busy`] while it is being attached or detached.
    pub fn require(&self, name: &str) -> Result<Arc<Attached>, Error> {
        match self.read().names.get(name) {
            Some(Slot::Ready(image)) => Ok(image.clone()),
            Some(Slot::Reserved) => Err(Error::new(Code::Busy, format!("image {name} is being attached or detached"))),
            None => Err(Error::new(Code::NotFound, format!("no image {name} is attached"))),
        }
    }

    /// The image of that node number.
    pub fn node(&self, node: u64) -> Option<Arc<Attached>> {
        self.read().nodes.get(&node).cloned()
    }

    /// Images with a higher node number, in order.
    pub fn after(&self, node: u64) -> Vec<Arc<Attached>> {
        self.read().nodes.range((Bound::Excluded(node), Bound::Unbounded)).map(|(_, image)| image.clone()).collect()
    }

    /// Takes an image out. Its name stays reserved until the reservation is dropped.
    ///
    /// # Errors
    /// [`Code::NotFound`] if somebody else has done so.
    pub fn take(self: &Arc<Self>, image: &Attached) -> Result<Reservation, Error> {
        let mut state = self.write();
        if state.nodes.remove(&image.node()).is_none() {
            return Err(Error::new(Code::NotFound, format!("no image {} is attached", image.name())));
        }
        state.names.insert(image.name().to_owned(), Slot::Reserved);
        Ok(Reservation { table: self.clone(), name: image.name().to_owned(), node: image.node(), published: false })
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A name nobody else can take meanwhile.
pub struct Reservation {
    table: Arc<Table>,
    name: String,
    node: u64,
    published: bool,
}

impl Reservation {
    /// The node number the image will have.
    pub fn node(&self) -> u64 {
        self.node
    }

    /// Makes the image visible.
    pub fn publish(mut self, image: Arc<Attached>) {
        let mut state = self.table.write();
        state.nodes.insert(self.node, image.clone());
        state.names.insert(self.name.clone(), Slot::Ready(image));
        drop(state);
        self.published = true;
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.published {
            self.table.write().names.remove(&self.name);
        }
    }
}
